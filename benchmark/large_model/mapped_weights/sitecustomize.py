"""Owns putting experts' weights into a mapped file, in each process that has this directory in its path.

A baseline: the engine computes as always, and the kernel decides which pages of the weights are in memory. Active only
where SGL_BATCH_BENCH_MAP names a directory, and only in processes that import torch.
"""

import importlib.abc
import importlib.machinery
import itertools
import os
import sys

_DIRECTORY = os.environ.get("SGL_BATCH_BENCH_MAP")


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Hooks the registration of parameters when torch's module for it is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch.nn.modules.module":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            _hook(module)

        spec.loader.exec_module = exec_module
        return spec


def _hook(module):
    import torch

    numbers = itertools.count()

    def put_into_file(_module, name, parameter):
        if name in ("w13_weight", "w2_weight") and parameter is not None:
            file = os.path.join(_DIRECTORY, f"{os.getpid()}-{next(numbers)}")
            with open(file, "wb") as made:
                made.truncate(parameter.nbytes)
            flat = torch.from_file(file, shared=True, size=parameter.numel(), dtype=parameter.dtype)
            os.unlink(file)
            parameter.data = flat.view(parameter.shape)

    module.register_module_parameter_registration_hook(put_into_file)


if _DIRECTORY:
    sys.meta_path.insert(0, _AfterTorch())
