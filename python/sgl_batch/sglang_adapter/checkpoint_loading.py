"""Adapts SGLang's checkpoint loader: what reads files, which weights stay in them, who sees the others; short logs.

SGLang's load_format may be a loader class, and ours derives from its default one. The callers decide which weights
stay, read files in its place, and find what is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from sgl_batch.sglang_adapter import bootstrap

with bootstrap.importing():
    from sglang.srt.configs.load_config import LoadFormat
    from sglang.srt.model_loader import loader as sglang_loader
    from sglang.srt.model_loader import weight_utils
    from sglang.srt.model_loader.loader import DefaultModelLoader

__all__ = [
    "ReformOf",
    "WeightReading",
    "WeightReform",
    "WeightWatch",
    "loading_bar",
    "loading_weights",
    "reformed_weights",
]

# The formats of SGLang's default loader. Other formats have other loaders, which we do not adapt.
_PLAIN_FORMATS = ("auto", "safetensors", "pt", "npcache")
_LOG_EVERY_S = 30.0


WeightReading = Callable[[Sequence[Path], Callable[[str], bool]], tuple[list[Path], Iterator[tuple[str, Tensor]]]]
"""Takes safetensors files, and whether the tensor of a name is wanted.

Returns the files whose reading is left to SGLang, and the names and tensors wanted of all others.
"""


WeightReform = Callable[[Sequence[str], Iterable[tuple[str, Tensor]]], Iterable[tuple[str, Tensor]]]
"""Takes a checkpoint's safetensors files and the names and tensors as they are read; returns those to be loaded."""

ReformOf = Callable[[str, str | None], WeightReform | None]
"""Takes the name of a model and its revision. Returns None for a checkpoint that is loaded as it is read."""


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
    server_args: Any,
    watch: WeightWatch,
    reading: WeightReading | None = None,
    leave: Callable[[str], bool] | None = None,
    reform_of: ReformOf | None = None,
) -> Iterator[list[str]]:
    """Inside, `watch` sees a checkpoint being loaded. Tensors whose names `leave` accepts are not loaded.

    `reform_of`: as in `reformed_weights`.

    `reading` reads safetensors files where no argument of SGLang's asks for a way to read them.

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
                with _copying_while_reading(target_device.type):
                    super().load_weights_and_postprocess(model, weights, target_device)
            finally:
                del model.load_weights

    with _few_lines_in_logs(), _read_by(reading, leave), reformed_weights(reform_of):
        if given not in _PLAIN_FORMATS:
            yield files
            return
        server_args.load_format = Loader
        try:
            yield files
        finally:
            server_args.load_format = given


@contextmanager
def reformed_weights(reform_of: ReformOf | None) -> Iterator[None]:
    """Inside, SGLang's default loader gives the tensors of each checkpoint in the form that `reform_of` has for it."""
    own = DefaultModelLoader._get_weights_iterator

    def read(loader: Any, source: Any) -> Iterator[tuple[str, Tensor]]:
        reform = None if reform_of is None else reform_of(source.model_or_path, source.revision)
        if reform is None:
            yield from own(loader, source)
            return
        found = loader._prepare_weights(source.model_or_path, source.revision, source.fall_back_to_pt)
        _, files, use_safetensors = found
        yield from reform(files if use_safetensors else [], own(loader, source))

    DefaultModelLoader._get_weights_iterator = read
    try:
        yield
    finally:
        DefaultModelLoader._get_weights_iterator = own


def loading_bar(what: str, num_bytes: int) -> Any:
    """Return a bar of SGLang's loaders for so many bytes: a context manager whose result has `update(bytes)`."""
    return weight_utils.tqdm(desc=what, total=num_bytes, unit="B", unit_scale=True)


@contextmanager
def _read_by(reading: WeightReading | None, leave: Callable[[str], bool] | None) -> Iterator[None]:
    """Inside, SGLang's default loader has safetensors files read by `reading`, but for those that this leaves to it."""
    name = "buffered_multi_thread_safetensors_weights_iterator"
    own = getattr(sglang_loader, name)

    def read(files: Sequence[str], max_workers: int, **ways: Any) -> Iterator[tuple[str, Tensor]]:
        asked = any(ways.get(way) for way in ("disable_mmap", "prefetch", "drop_cache_after_load"))
        if reading is None or asked:
            yield from own(files, max_workers=max_workers, **ways)
            return
        left, tensors = reading([Path(file) for file in files], lambda name: leave is None or not leave(name))
        if left:
            yield from own([str(file) for file in left], max_workers=max_workers, **ways)
        if len(left) == len(files):
            return
        with loading_bar(
            "Loading weights", sum(Path(file).stat().st_size for file in files if Path(file) not in left)
        ) as bar:
            for name, tensor in tensors:
                yield name, tensor
                bar.update(tensor.nbytes)

    setattr(sglang_loader, name, read)
    try:
        yield
    finally:
        setattr(sglang_loader, name, own)


@contextmanager
def _copying_while_reading(device: str) -> Iterator[None]:
    """Inside, models on a CPU copy each tensor before they ask for the next, and not in threads of their own.

    Threads hide the copies to another device. Here there are none to hide, and who reads tensors would not know which
    are loaded, nor whose memory is free again.
    """
    found = [module for name, module in sys.modules.items() if name.startswith("sglang.srt.models.")]
    copying = {module: module.should_async_load for module in found if hasattr(module, "should_async_load")}
    for module in copying if device == "cpu" else ():
        module.should_async_load = lambda _: False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module, own in copying.items():
            module.should_async_load = own  # type: ignore[attr-defined]


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
