"""Decides which arguments a model's family requires, and which it refuses, before a start."""

from __future__ import annotations

from collections.abc import Mapping

from sgl_batch.checkpoint.model_directory import architectures
from sgl_batch.config import BatchConfig
from sgl_batch.errors import ConfigError
from sgl_batch.model_executor.families import FAMILIES, Family


def family_named_by(arguments: Mapping[str, object]) -> Family | None:
    """Return the adapter of the model in SGLang's arguments; None for an unknown family, or without a config here."""
    revision = arguments.get("revision")
    known = architectures(str(arguments.get("model_path")), None if revision is None else str(revision)) or ()
    return next((family for family in FAMILIES if any(name in family.architectures for name in known)), None)


def has_sinks(arguments: Mapping[str, object]) -> bool:
    """Return whether the model's attention has sinks."""
    family = family_named_by(arguments)
    return family is not None and family.sinks


def family_arguments(given: Mapping[str, object], config: BatchConfig, *, on_cpu: bool) -> dict[str, object]:
    """Return the arguments of SGLang's that the model's family requires. Raises ConfigError for unsupported ones."""
    family = family_named_by(given)
    if family is None or not family.clamped_experts:
        return {}
    if config.forward.expert_runner == "deepgemm":
        raise ConfigError(
            f"expert_runner is 'deepgemm', which has no biases and no clamped activation, and the experts of "
            f"{family.architectures[0]} have both: choose auto, sglang or triton"
        )
    # SGLang's other runners lay weights out in a form that ours do not read, and do not accept rows without an expert.
    return {} if on_cpu or given.get("moe_runner_backend") is not None else {"moe_runner_backend": "triton"}
