"""Owns the stage that imports all our modules, and reports which packages of a GPU machine are installed."""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import sys
import traceback
from pathlib import Path
from typing import Any

# Modules that we do not require, by the package that installs them.
OPTIONAL = {
    "sgl_batch_kernel": "native kernels and the host KV store: pip install ./sgl-kernel",
    "sgl_kernel": "sglang-kernel: SGLang's kernels for GPUs",
    "sgl_kernel.flash_ops": "sglang-kernel: attention backend fa3",
    "flashinfer": "flashinfer_python",
    "xgrammar": "xgrammar",
    "triton": "triton",
    "deep_gemm": "sgl-deep-gemm",
    "deep_ep": "sgl-deep-ep",
}


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Import all modules; the first failure is the stage's error, and the log has all with their tracebacks."""
    import torch

    import sgl_batch

    print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, CUDA of torch {torch.version.cuda}")
    if torch.cuda.is_available():
        print(f"{torch.cuda.get_device_name()}, capability {torch.cuda.get_device_capability()}")
    names = [module.name for module in pkgutil.walk_packages(sgl_batch.__path__, "sgl_batch.", onerror=lambda _: None)]
    failed = {name: error for name in names if (error := _import(name)) is not None}
    missing = [name for name in OPTIONAL if _import(name) is not None]
    for name in missing:
        print(f"missing: {name} ({OPTIONAL[name]})")
    without = ", ".join(missing) or "nothing"
    found: dict[str, Any] = {"remark": f"{len(names) - len(failed)} modules; missing: {without}"}
    if failed:
        name, error = next(iter(failed.items()))
        found["error"] = (
            f"{len(failed)} of {len(names)} modules cannot be imported: {name}: {error}; missing: {without}"
        )
    return found


def _import(name: str) -> str | None:
    """Import a module; return why it fails, which may be anything that its code does.

    One of ours that says itself which optional package it lacks has been imported as far as it can be.
    """
    from sgl_batch.errors import ConfigError

    try:
        importlib.import_module(name)
    except ConfigError as error:
        print(f"{name}: {error}")
    except (Exception, SystemExit) as error:  # noqa: BLE001
        print(f"--- {name}")
        traceback.print_exc(file=sys.stdout)
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from bringup.stage_result import answer

    answer(run)
