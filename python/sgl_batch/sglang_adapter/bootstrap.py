"""Owns the preparations for importing SGLang: version check, torchvision's operator schemas, no compiler on a CPU."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from sgl_batch.errors import ConfigError
from sgl_batch.sglang_adapter.absent_packages import has_nvidia_gpu, is_installed, stand_ins

KNOWN_SGLANG_VERSIONS = ("0.5.16",)

_libraries: list[Any] = []


def sglang_version() -> str:
    """Return the version of the installed SGLang. Raises ConfigError if none is installed or we do not know it."""
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"sglang is not installed; install sglang=={KNOWN_SGLANG_VERSIONS[0]} "
            "(scripts/install does so, or `pip install sgl-batch[cuda]` on a GPU machine)"
        ) from error
    if version not in KNOWN_SGLANG_VERSIONS:
        known = ", ".join(KNOWN_SGLANG_VERSIONS)
        raise ConfigError(
            f"sglang {version} is installed, but this sgl_batch knows only {known}, because it extends private "
            f"classes that change between releases; install sglang=={KNOWN_SGLANG_VERSIONS[-1]}"
        )
    return version


@cache
def _check_kernels() -> None:
    """Raise ConfigError if SGLang's kernels are missing on a machine with a GPU, where SGLang imports them at once."""
    if has_nvidia_gpu() and not is_installed("sgl_kernel"):
        raise ConfigError(
            "this machine has a GPU, and SGLang's kernels for it (sglang-kernel) are not installed: "
            "pip install 'sgl-batch[cuda]'"
        )


def _torchvision_operators_load() -> bool:
    spec = importlib.util.find_spec("torchvision")
    if spec is None:
        return True
    import torch

    return bool(torch.version.cuda)


def prepare() -> None:
    """Check SGLang's version and its kernels, and let torchvision import with a CPU build of torch. Idempotent.

    It also silences SGLang's warnings at import about GPU quantisation kernels that a CPU does not use, and about our
    variables of the environment, which it takes for its own former ones; FastAPI's about the class of SGLang's answers,
    which only SGLang can change; and a tokenizer's about a prompt that is too long, which its request's error says.

    torchvision's wheel has operators compiled for CUDA builds, which do not load with a CPU build of torch. Its Python
    files need the schemas of two of them only, and we never call these.
    """
    sglang_version()
    _check_kernels()
    logging.getLogger("transformers.tokenization_utils_base").addFilter(_names_no_long_prompt)
    warnings.filterwarnings("ignore", message="ORJSONResponse is deprecated")
    warnings.filterwarnings("ignore", message="Environment variable SGL_BATCH_")
    warnings.filterwarnings("ignore", message="Only CUDA.* support|Triton is not supported on current platform")
    if _libraries or _torchvision_operators_load():
        return
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)


def _names_no_long_prompt(record: logging.LogRecord) -> bool:
    return "sequence length is longer than" not in record.getMessage()


@contextmanager
def importing() -> Iterator[None]:
    """Import SGLang inside this block: prepared, without the garbage collector, and on a CPU without a compiler."""
    with collector_paused():
        prepare()
        with _nothing_compiled(), stand_ins():
            yield


@contextmanager
def _nothing_compiled() -> Iterator[None]:
    """Inside, torch.compile returns functions as they are, unless torch has CUDA.

    SGLang decorates dozens of functions when it is imported, which loads torch's compiler: 45 MB in each of three
    processes, for kernels that a CPU does not use.
    """
    import torch

    compile_ = torch.compile
    if torch.version.cuda or compile_ is _left_alone:
        yield
        return
    torch.compile = _left_alone
    try:
        yield
    finally:
        torch.compile = compile_


def _left_alone(model: Any = None, **_: Any) -> Any:
    return _left_alone if model is None else model


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector for imports, if it is enabled, and keep from it for good what is there then.

    Importing SGLang makes more than half a million objects that stay. To search them for garbage again and again takes
    a tenth of the import's time, and the end of a program another second.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()
            gc.enable()
