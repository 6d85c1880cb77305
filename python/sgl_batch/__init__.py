"""sgl_batch: batch inference for mixture-of-experts models on SGLang's processes.

`Engine` is imported on first use, so that `import sgl_batch` and the command line stay quick.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgl_batch.engine import Engine

__version__ = "0.1.0"
__all__ = ["Engine", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from sgl_batch.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
