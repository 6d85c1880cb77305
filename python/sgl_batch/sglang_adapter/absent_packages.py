"""Owns importing SGLang on a machine that lacks packages which SGLang imports at once but uses only on request.

startup/gpu_arguments decides what runs in their place.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

# The requirement that installs each package, in the version that SGLang 0.5.16 needs.
REQUIREMENTS = {
    "flashinfer": "flashinfer_python==0.6.14",
    "sgl_kernel": "sglang-kernel==0.4.5",
    "xgrammar": "xgrammar==0.2.1",
}
# The names that SGLang imports from a package even if it does not use them, by module.
_NAMES = {
    "flashinfer": (),
    "flashinfer.prefill": ("cudnn_batch_prefill_with_kv_cache",),
    "flashinfer.sampling": ("min_p_sampling_from_probs", "top_k_top_p_sampling_from_probs"),
    "xgrammar": (
        "CompiledGrammar",
        "GrammarCompiler",
        "GrammarMatcher",
        "StructuralTagItem",
        "TokenizerInfo",
        "allocate_token_bitmask",
        "apply_token_bitmask_inplace",
    ),
}
# Names for which SGLang has a value of its own without the package.
_VALUES: dict[str, dict[str, Any]] = {"xgrammar": {"StructuralTag": Any, "get_model_structural_tag": None}}
# The variable that SGLang checks before it imports more of flashinfer.
_FLASHINFER_SWITCH = "SGLANG_IS_FLASHINFER_AVAILABLE"


def has_nvidia_gpu() -> bool:
    """Return whether SGLang will treat the machine as one with NVIDIA GPUs. It decides that when it is imported."""
    import torch

    return bool(torch.version.cuda and torch.cuda.is_available())


def is_installed(package: str) -> bool:
    """Return whether a package is installed, without importing it."""
    return find_spec(package) is not None


def has_flash_attention_3() -> bool:
    """Return whether SGLang's kernels have the library of attention backend fa3, which trimmed wheels lack."""
    spec = find_spec("sgl_kernel")
    folders = [] if spec is None else spec.submodule_search_locations or []
    return any(any(Path(folder).glob("flash_ops.*so")) for folder in folders)


@contextmanager
def stand_ins() -> Iterator[None]:
    """Inside, SGLang can import the names of missing packages. Calling one of these names raises ImportError.

    SGLang imports flashinfer only on a machine with a GPU.
    """
    absent = [] if is_installed("xgrammar") else ["xgrammar"]
    if has_nvidia_gpu() and not is_installed("flashinfer"):
        absent.append("flashinfer")
        os.environ[_FLASHINFER_SWITCH] = "false"  # child processes read it too
    names = [name for name in _NAMES if name.partition(".")[0] in absent]
    before = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update((name, _stand_in(name)) for name in names)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(before)


def _stand_in(module_name: str) -> ModuleType:
    module = ModuleType(module_name)
    module.__path__ = []  # it may be a package
    package = module_name.partition(".")[0]
    for name in _NAMES[module_name]:
        setattr(module, name, type(name, (), {"__new__": _refusal(package, name)}))
    vars(module).update(_VALUES.get(module_name, {}))
    return module


def _refusal(package: str, name: str) -> Any:
    def refuse(*_: object, **__: object) -> None:
        remedy = f"pip install {REQUIREMENTS[package]}"
        raise ImportError(f"{package} is not installed, and SGLang calls its {name}: {remedy}", name=package)

    return refuse
