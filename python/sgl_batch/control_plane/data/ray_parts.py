"""Hands on the parts of `ray.data.llm` that are internal to Ray, for the one version of Ray that they are known of."""

from __future__ import annotations

import ray

from sgl_batch.errors import ConfigError

RAY_VERSION = "2.60.0"
_INSTALL = f"install ray[data]=={RAY_VERSION} (the extra `ray` of sgl-batch brings it)"


def check_version(version: str) -> None:
    """Raise ConfigError for another version of Ray than the one whose parts are known."""
    if version != RAY_VERSION:
        raise ConfigError(
            f"Ray {version} is installed, and sgl_batch.ray uses internal parts of Ray {RAY_VERSION}: {_INSTALL}"
        )


check_version(ray.__version__)
try:
    from ray.llm._internal.batch.processor.base import OfflineProcessorConfig, ProcessorBuilder
    from ray.llm._internal.batch.processor.base import Processor as RayProcessor
except ImportError as error:
    raise ConfigError(
        f"Ray {ray.__version__} has no ray.data.llm that can be imported ({error}): {_INSTALL}"
    ) from error

__all__ = ["RAY_VERSION", "OfflineProcessorConfig", "ProcessorBuilder", "RayProcessor", "check_version", "register"]


def register(config_type: type, builder: object) -> None:
    """Let `ray.data.llm.build_processor` use `builder` for this type of config.

    Ray refuses a second registration of a name. A module that is imported anew registers its own builder instead.
    """
    ProcessorBuilder._registry.pop(config_type.__name__, None)
    ProcessorBuilder.register(config_type, builder)
