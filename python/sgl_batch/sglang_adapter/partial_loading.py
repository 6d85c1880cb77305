"""SGLang's loader of checkpoints, for a model of which some weights are left in their files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sgl_batch.sglang_adapter import bootstrap

with bootstrap.importing():
    from sglang.srt.configs.load_config import LoadFormat
    from sglang.srt.model_loader.loader import DefaultModelLoader

__all__ = ["leaving_weights"]


@contextmanager
def leaving_weights(server_args: Any, leave: Callable[[str], bool]) -> Iterator[list[str]]:
    """Inside, a checkpoint is loaded but for the tensors whose names `leave` holds for; yields the safetensors files.

    The list is filled when the model is loaded; it stays empty for a checkpoint of another format.
    """
    files: list[str] = []

    class PartialLoader(DefaultModelLoader):  # type: ignore[misc]
        def __init__(self, load_config: Any) -> None:
            load_config.load_format = LoadFormat.AUTO
            super().__init__(load_config)

        def _prepare_weights(self, *args: Any, **kwargs: Any) -> Any:
            folder, found, use_safetensors = super()._prepare_weights(*args, **kwargs)
            files[:] = found if use_safetensors else []
            return folder, found, use_safetensors

        def _get_all_weights(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
            return ((name, weight) for name, weight in super()._get_all_weights(*args, **kwargs) if not leave(name))

    given = server_args.load_format
    server_args.load_format = PartialLoader
    try:
        yield files
    finally:
        server_args.load_format = given
