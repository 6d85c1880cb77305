"""The doctor's checks of a model, and of which forward pass was measured as the fastest for it here."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_batch.byte_sizes import format_bytes
from sgl_batch.cli_doctor.machine import Machine
from sgl_batch.cli_doctor.rows import Row, State
from sgl_batch.errors import ConfigError
from sgl_batch.model_directory import ModelPlace, check_model, num_experts
from sgl_batch.sglang_adapter.known_models import is_known_architecture


def model(machine: Machine) -> Sequence[Row]:
    """Whether the model that was asked about can be loaded, and how large it is."""
    path = machine.model
    if path is None:
        return []
    try:
        check_model(ModelPlace(model=str(path)), is_known_architecture)
    except ConfigError as error:
        return [Row(check="model", state=State.FAILED, found=str(error), required=True)]
    size, experts = sum(file.stat().st_size for file in path.glob("*.safetensors")), num_experts(str(path))
    found = f"{path}: {format_bytes(size)} of weights, {experts or 'no'} experts in a layer"
    return [Row(check="model", state=State.OK, found=found, required=True, values={"weight_bytes": size})]
