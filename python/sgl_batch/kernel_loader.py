"""Owns loading the native kernels: the only importer of `sgl_batch_kernel`."""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType

from sgl_batch.errors import ConfigError

logger = logging.getLogger(__name__)

# The versions of the interfaces that this package calls: of the module, and of its loader of experts.
_INTERFACE = 20
_LOADER_INTERFACE = 4

BUILD_KERNELS = "build them with scripts/install, or with a GPU: `pip install --no-build-isolation ./sgl-kernel`"


def kernel_interface() -> int:
    """Return the version of the native kernels' interface that this package calls. It changes with what they can do."""
    return _INTERFACE


@cache
def native_kernels() -> ModuleType | None:
    """Return the compiled module, or None if it cannot be loaded, with a warning that gives the reason.

    Raises ConfigError if SGL_BATCH_ISA names an instruction set that this machine lacks.
    """
    try:
        import sgl_batch_kernel
    except (ImportError, OSError, StopIteration) as error:
        logger.warning(
            "the native kernels cannot be loaded (%s: %s): experts and linear layers run as torch operators, several "
            "times slower; scripts/install builds them",
            type(error).__name__,
            error,
        )
        return None
    found = getattr(sgl_batch_kernel, "INTERFACE", 1)
    if found != _INTERFACE:
        logger.warning(
            "the native kernels that are installed are of another version (interface %d, not %d): experts and linear "
            "layers run as torch operators, several times slower; scripts/install builds those that belong here",
            found,
            _INTERFACE,
        )
        return None
    try:
        sgl_batch_kernel.isa()
    except RuntimeError as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    return sgl_batch_kernel


def kv_store_kernels() -> ModuleType:
    """Return the native library's store of KV pages (`sgl_batch_kernel.kv_store`).

    Raises ConfigError if it cannot be loaded: nothing else copies pages to a store.
    """
    if native_kernels() is not None:
        try:
            from sgl_batch_kernel import kv_store
        except ImportError:
            pass  # the library was built before it had a store
        else:
            return kv_store
    raise ConfigError(
        "the host KV store (--kv-store-bytes) needs the native kernels, which cannot be loaded here or are of an older "
        f"version: {BUILD_KERNELS}; or run without a store"
    )


def expert_loader_kernels() -> ModuleType:
    """Return the native library's loader of experts (`sgl_batch_kernel.expert_loader`).

    Raises ConfigError if it cannot be loaded: nothing else reads weights while the model runs.
    """
    if native_kernels() is not None:
        try:
            from sgl_batch_kernel import expert_loader
        except ImportError:
            pass  # the library was built before it had a loader
        else:
            if getattr(expert_loader, "INTERFACE", 1) == _LOADER_INTERFACE:
                return expert_loader
    raise ConfigError(
        "--weights streamed needs the native kernels, which cannot be loaded here or are of an older version: "
        f"{BUILD_KERNELS}; or use --weights resident"
    )


def kernels_in_use() -> str:
    """Return what computes experts and linear layers on a CPU: the native kernels' instruction set, or "torch"."""
    kernels = native_kernels()
    return "torch" if kernels is None else str(kernels.isa())
