"""Decides which arguments let an engine on a CPU load a quantised checkpoint, and which it may profit from."""

from __future__ import annotations

import json
from collections.abc import Mapping

from sgl_batch.checkpoint.model_directory import form_of_weights
from sgl_batch.config import ForwardConfig
from sgl_batch.core.model_refusals import QUANTIZATION_FIELDS
from sgl_batch.errors import ConfigError

_OVERRIDES = "json_model_override_args"


def quantised_arguments(given: Mapping[str, object], *, on_cpu: bool) -> dict[str, object]:
    """Return the arguments with which SGLang builds a quantised model as one of floats; none on a GPU.

    Its config then says nothing of the quantisation, which `weights.dequantised` takes back as the files are read.
    """
    revision = given.get("revision")
    if not on_cpu or form_of_weights(str(given.get("model_path")), None if revision is None else str(revision)) is None:
        return {}
    overrides = json.loads(str(given.get(_OVERRIDES) or "{}"))
    return {
        _OVERRIDES: json.dumps({**overrides, **dict.fromkeys(QUANTIZATION_FIELDS)}),
        "quantization": None,
    }


def may_stream(model: str, revision: str | None, *, quantization: str | None, on_cpu: bool) -> bool:
    """Return whether the experts of a model can be read while it runs, as far as its config says.

    `quantization`: the method that a config or an argument names; None for a model of floats.
    """
    if quantization is None:
        return True
    form = form_of_weights(model, revision) if on_cpu else None
    return form is not None and form.is_streamable


def check_streamed_form(
    model: str, revision: str | None, forward: ForwardConfig, *, quantization: str | None, on_cpu: bool
) -> None:
    """Refuse to stream the experts of a model that is quantised, but for forms that a CPU reads: see `may_stream`.

    Raises ConfigError.
    """
    if not may_stream(model, revision, quantization=quantization, on_cpu=on_cpu):
        raise ConfigError(
            f"weights are to be streamed, and the model's are quantised ({quantization}); streamed weights are bf16 or "
            "float32, or on a CPU fp8 (e4m3), int8 (compressed-tensors) or numbers of 4 bits in order: name a "
            "checkpoint of these, or leave --weights out"
        )
    if quantization is not None and forward.cpu_weight_dtype != "auto":
        raise ConfigError(
            f"cpu_weight_dtype is {forward.cpu_weight_dtype!r}, and the model's weights are quantised and streamed, as "
            "they lie in the files: leave --cpu-weight-dtype out"
        )


def activations_advice(model: str, revision: str | None, forward: ForwardConfig) -> str | None:
    """Return what to say of a model on a CPU that was made for rows of int8, where they stay floats; else None."""
    if forward.cpu_activations != "model":
        return None
    form = form_of_weights(model, revision)
    if form is None or not form.for_int8_rows:
        return None
    return (
        "the model was made for rows that are rounded to int8, and they stay as they are: --cpu-weight-dtype int8 "
        "--cpu-activations int8 rounds them, which is faster and changes tokens"
    )
