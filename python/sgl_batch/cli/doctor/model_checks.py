"""Owns the doctor's checks of a model, and of the choices that self-checks made for it on this device."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_batch.byte_sizes import format_bytes
from sgl_batch.checkpoint.model_directory import ModelSource, num_experts
from sgl_batch.cli.doctor.machine import Machine
from sgl_batch.cli.doctor.rows import Row, State
from sgl_batch.core.start_choices import Choice
from sgl_batch.errors import ConfigError
from sgl_batch.startup.choice_cache import ChoiceCache, ChoiceKey, choice_directory, model_hash, versions
from sgl_batch.startup.model_checks import check_any_device


def model(machine: Machine) -> Sequence[Row]:
    """Check whether the model can be loaded, and how large it is."""
    path = machine.model
    if path is None:
        return []
    try:
        check_any_device(ModelSource(model=str(path)))
    except ConfigError as error:
        return [Row(check="model", state=State.FAILED, found=str(error), required=True)]
    size, experts = sum(file.stat().st_size for file in path.glob("*.safetensors")), num_experts(str(path))
    found = f"{path}: {format_bytes(size)} of weights, {experts or 'no'} experts in a layer"
    return [Row(check="model", state=State.OK, found=found, required=True, values={"weight_bytes": size})]


def self_checks(machine: Machine) -> Sequence[Row]:
    """Show which decode forward and expert runner won the self-checks on this device, with these versions."""
    device = machine.load("torch").cuda.get_device_name(0) if machine.has_gpu else "cpu"
    kept = [
        (key, choice)
        for key, choice in ChoiceCache(choice_directory(machine.environment)).kept()
        if key.device == device and key.versions == versions()
    ]
    wanted = None if machine.model is None else model_hash(str(machine.model))
    shown = [one for one in kept if wanted in (None, one[0].model)]
    remedy = "" if shown else "an engine measures at its start, on a GPU or with --decode-forward measure"
    return [
        Row(
            check="self-checks",
            state=State.OK,
            found=" | ".join(_choice_text(key, choice) for key, choice in shown) or "not measured on this machine",
            remedy=remedy,
            values={
                "choices": [{"option": key.option, "model": key.model, "mode": choice.mode} for key, choice in shown]
            },
        )
    ]


def _choice_text(key: ChoiceKey, choice: Choice) -> str:
    sizes = key.settings.get("sizes") or key.settings.get("tokens")
    return f"{key.option.replace('_', ' ')}, model {key.model[:8]}, groups of {sizes}: {choice.why}"
