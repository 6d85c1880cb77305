"""Names for users of Ray: what `sgl_batch.control_plane` has for them, imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgl_batch.control_plane.data.predictor import SglBatchPredictor
    from sgl_batch.control_plane.data.processor import SglBatchEngineProcessorConfig, map_batches_arguments

_MODULES = {
    "SglBatchEngineProcessorConfig": "sgl_batch.control_plane.data.processor",
    "SglBatchPredictor": "sgl_batch.control_plane.data.predictor",
    "map_batches_arguments": "sgl_batch.control_plane.data.processor",
}
__all__ = ["SglBatchEngineProcessorConfig", "SglBatchPredictor", "map_batches_arguments"]


def __getattr__(name: str) -> Any:
    """Return the name, imported now. Raises ConfigError where Ray is missing or of another version."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        from sgl_batch.errors import ConfigError

        raise ConfigError("Ray is not installed: pip install 'sgl-batch[ray]' brings the version that fits") from error
