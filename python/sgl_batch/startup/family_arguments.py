"""Decides what a model's family makes of the arguments: what they must be, and what is refused before a start."""

from __future__ import annotations

from collections.abc import Mapping

from sgl_batch.checkpoint.model_directory import architectures
from sgl_batch.config import BatchConfig
from sgl_batch.errors import ConfigError
from sgl_batch.model_executor.families import FAMILIES, Family


def family_named_by(arguments: Mapping[str, object]) -> Family | None:
    """The adapter of the model that SGLang's arguments name; None for an unknown family, or without a config here."""
    revision = arguments.get("revision")
    known = architectures(str(arguments.get("model_path")), None if revision is None else str(revision)) or ()
    return next((family for family in FAMILIES if any(name in family.architectures for name in known)), None)


def has_sinks(arguments: Mapping[str, object]) -> bool:
    """Whether the model's attention has sinks."""
    family = family_named_by(arguments)
    return family is not None and family.sinks


def family_arguments(given: Mapping[str, object], config: BatchConfig, *, on_cpu: bool) -> dict[str, object]:
    """What SGLang's arguments must be for the model's family. Raises ConfigError for what it does not do."""
    family = family_named_by(given)
    if family is None or not family.clamped_experts:
        return {}
    experts = f"the experts of {family.architectures[0]}"
    if config.memory.weights == "streamed":
        raise ConfigError(
            f"weights are to be streamed, and {experts} lie in a checkpoint as one tensor for a layer, with inputs and "
            "outputs exchanged, from which one expert cannot be read as it is computed with: use --weights resident"
        )
    if config.forward.expert_runner == "deepgemm":
        raise ConfigError(
            f"expert_runner is 'deepgemm', which has no biases and no clamped activation, and {experts} have both: "
            "choose auto, sglang or triton"
        )
    # Another of SGLang's runners would lay weights out as ours do not read them, and take no choice of no expert.
    return {} if on_cpu or given.get("moe_runner_backend") is not None else {"moe_runner_backend": "triton"}
