"""Prepares this process for SGLang before the test modules that import it; all other modules do not pay for that."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).resolve().parent
# Rooms whose tests build SGLang's own classes. Elsewhere our adapter imports SGLang, and prepares the process itself.
_BUILD_SGLANGS_CLASSES = ("layers", "mem_cache", "model_executor", "sglang_adapter")


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Prepare the process where a module needs it; pytest goes on to import the module."""
    if module_path.relative_to(_HERE).parts[0] in _BUILD_SGLANGS_CLASSES:
        from sgl_batch.sglang_adapter import bootstrap

        bootstrap.prepare()
