"""Adapts SGLang's checkpoint loader: some weights stay in their files, a watch sees the others, and logs stay short.

SGLang's load_format may be a loader class, and ours derives from its default one. The callers decide which weights
stay, and find what is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from sgl_batch.sglang_adapter import bootstrap

with bootstrap.importing():
    from sglang.srt.configs.load_config import LoadFormat
    from sglang.srt.model_loader import weight_utils
    from sglang.srt.model_loader.loader import DefaultModelLoader

__all__ = ["WeightWatch", "loading_weights"]

# The formats of SGLang's default loader. Other formats have other loaders, which we do not adapt.
_PLAIN_FORMATS = ("auto", "safetensors", "pt", "npcache")
_LOG_EVERY_S = 30.0


class WeightWatch(Protocol):
    """Sees the weights of a checkpoint while they are loaded into the parameters of a model."""

    def load(
        self,
        model: nn.Module,
        weights: Iterable[tuple[str, Tensor]],
        load_weights: Callable[[Iterable[tuple[str, Tensor]]], object],
    ) -> None:
        """Call `load_weights`, the model's own, with `weights`: (name, tensor) pairs of a checkpoint."""


@contextmanager
def loading_weights(
    server_args: Any, watch: WeightWatch, leave: Callable[[str], bool] | None = None
) -> Iterator[list[str]]:
    """Inside, `watch` sees a checkpoint being loaded. Tensors whose names `leave` accepts are not loaded.

    Yields the safetensors files. The list is filled when the model is loaded, and stays empty for a checkpoint of
    another format.
    """
    files: list[str] = []
    given = server_args.load_format

    class Loader(DefaultModelLoader):  # type: ignore[misc]
        def __init__(self, load_config: Any) -> None:
            load_config.load_format = LoadFormat(given) if leave is None else LoadFormat.AUTO
            super().__init__(load_config)

        def _prepare_weights(self, *args: Any, **kwargs: Any) -> Any:
            folder, found, use_safetensors = super()._prepare_weights(*args, **kwargs)
            files[:] = found if use_safetensors else []
            return folder, found, use_safetensors

        def _get_all_weights(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
            everything = super()._get_all_weights(*args, **kwargs)
            return ((name, weight) for name, weight in everything if leave is None or not leave(name))

        def load_weights_and_postprocess(self, model: Any, weights: Any, target_device: Any) -> None:
            load_weights = model.load_weights
            model.load_weights = lambda weights: watch.load(model, weights, load_weights)
            try:
                super().load_weights_and_postprocess(model, weights, target_device)
            finally:
                del model.load_weights

    with _few_lines_in_logs():
        if given not in _PLAIN_FORMATS:
            yield files
            return
        server_args.load_format = Loader
        try:
            yield files
        finally:
            server_args.load_format = given


@contextmanager
def _few_lines_in_logs() -> Iterator[None]:
    """Inside, the bars of SGLang's loaders are for terminals: a log gets a line of a long load now and then."""
    own = weight_utils.tqdm

    class Bar(own):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            every_s = {} if sys.stderr.isatty() else {"delay": _LOG_EVERY_S, "mininterval": _LOG_EVERY_S}
            super().__init__(*args, **kwargs, **every_s)

    weight_utils.tqdm = Bar
    try:
        yield
    finally:
        weight_utils.tqdm = own
