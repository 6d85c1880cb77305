"""Owns refusing a model before any process of an engine starts. core/model_refusals decides which and why."""

from __future__ import annotations

import json
from collections.abc import Mapping

from sgl_batch.checkpoint.model_directory import ModelSource, check_model, model_config, num_experts, quantization
from sgl_batch.config import BatchConfig
from sgl_batch.core.model_refusals import Config, check_without_adapter, number_type, refusal
from sgl_batch.core.supported_models import CPU, GPU, Status, family_named, format_of, has_adapter
from sgl_batch.errors import ConfigError
from sgl_batch.sglang_adapter.known_models import has_own_model, is_known_architecture, is_known_quantization


def check_any_device(source: ModelSource) -> None:
    """Refuse a model that cannot be loaded, or is computed correctly on no device. Takes milliseconds.

    Raises ConfigError.
    """
    config = model_config(source.model, source.revision) or {}
    _refuse(source.model, config, refusal(config))  # before its files are read, which may have another form
    check_model(source, is_known_architecture, is_known_quantization)
    config = (
        model_config(source.model, source.revision) or {}
    )  # check_model has fetched it from the hub where it was not here
    _refuse(source.model, config, refusal(config) or _not_measured(config))


def _not_measured(config: Config) -> str | None:
    """Return why a model is refused that SGLang would run with transformers' modules: not all load or are right."""
    listed = config.get("architectures")
    named = [str(name) for name in listed] if isinstance(listed, list) else []
    if "auto_map" in config or not named or any(family_named(name) or has_own_model(name) for name in named):
        return None
    return "SGLang has no model of its own for it, and transformers' model is not measured to be right under SGLang"


def check_this_device(arguments: Mapping[str, object], ours: BatchConfig, *, on_cpu: bool) -> None:
    """Refuse a model that this device cannot compute correctly with these arguments. Raises ConfigError.

    `arguments`: SGLang's, with our defaults. A model whose config is not here is checked when it is loaded.
    """
    given = {name: str(value) for name, value in arguments.items() if value is not None}
    name = given.get("model_path", "")
    config = model_config(name, given.get("revision"))
    if config is None:
        return
    asked = given.get("quantization")
    if on_cpu and asked is not None and asked != quantization(name, given.get("revision")):
        raise ConfigError(
            f"quantization is {asked!r}, and the weights of {name} are not quantised so; SGLang's kernels that round "
            "them while they are loaded are for GPUs: leave it out, or give --cpu-weight-dtype int8"
        )
    config |= json.loads(given.get("json_model_override_args", "{}"))
    if asked is not None:
        config.setdefault("quantization_config", {"quant_method": asked})
    device, context = CPU if on_cpu else GPU, given.get("context_length")
    _refuse(name, config, refusal(config, device=device, context=None if context is None else int(context)))
    number_format = format_of(number_type(config, given.get("dtype", "auto"))).on(device)
    if number_format.status is Status.REFUSED:
        raise ConfigError(f"the model {name} would run in float16: {number_format.note}")
    architecture = str((config.get("architectures") or ("it",))[0])
    if not has_adapter(architecture):
        num_ranks = 1 if num_experts(name) is None else int(given.get("dp_size", 1))
        check_without_adapter(architecture, ours, num_ranks=num_ranks)


def _refuse(name: str, config: Config, why: str | None) -> None:
    if why is None:
        return
    named = config.get("architectures")
    listed = f" ({', '.join(map(str, named))})" if isinstance(named, list) else ""
    raise ConfigError(f"the model {name}{listed} is refused: {why}; `sgl-batch models` lists what runs")
