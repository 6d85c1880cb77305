"""Owns refusing, from a model's files alone, what an engine refuses only as it loads them: sizes and number types."""

from __future__ import annotations

from sgl_batch.byte_sizes import format_bytes
from sgl_batch.config import BatchConfig, MemoryConfig
from sgl_batch.core.model_numbers import number
from sgl_batch.core.model_refusals import Config
from sgl_batch.errors import ConfigError
from sgl_batch.memory.free_memory import machine_bytes
from sgl_batch.planner.needs import Model

CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_sequence_length")


def check_asked(model: Model, config: BatchConfig, *, page_size: int, here: bool) -> None:
    """Raise ConfigError for what no engine of this model takes.

    `here`: whether it is for this machine, whose memory then limits a store.
    """
    _check_coded(model, config)
    _check_store(config.memory, page_size * model.kv_token_bytes, here=here)
    _check_weight_memory(model, config)


def check_context(text: Config, asked: int, name: str) -> None:
    """Raise ConfigError for sequences, called `name`, of more tokens than the model has positions."""
    most = int(number(text.get, *CONTEXT_FIELDS) * _stretch(text))
    if 0 < most < asked:
        raise ConfigError(f"{name}: {asked:,} tokens, and a sequence of this model has at most {most:,}; give less")


def _stretch(text: Config) -> float:
    """Return by how much rotary scaling stretches the positions of a model's config, which SGLang then allows."""
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    is_counted = "original_max_position_embeddings" in scaling or scaling.get("rope_type") == "llama3"
    return 1.0 if is_counted else float(scaling.get("factor") or 1)


def _check_coded(model: Model, config: BatchConfig) -> None:
    if config.forward.cpu_weight_dtype != "lossless12" or (model.dtype == "bfloat16" and model.expert_layers):
        return
    why = "the model has none" if not model.expert_layers else f"its are {model.dtype}"
    raise ConfigError(
        f"cpu_weight_dtype is 'lossless12', which is for experts of bfloat16, and {why}: leave it out, or give --dtype "
        "bfloat16 to a model with experts"
    )


def _check_store(memory: MemoryConfig, page_bytes: int, *, here: bool) -> None:
    if 0 < memory.kv_store_bytes < page_bytes:
        raise ConfigError(
            f"kv_store_bytes is {format_bytes(memory.kv_store_bytes)}, and a page of KV takes "
            f"{format_bytes(page_bytes)} in all layers: raise --kv-store-bytes"
        )
    machine = machine_bytes()
    if here and memory.store_in_memory_bytes > machine:
        raise ConfigError(
            f"kv_store_bytes is {format_bytes(memory.store_in_memory_bytes)}, and this machine has "
            f"{format_bytes(machine)}: lower --kv-store-bytes, or name a directory for the store (--kv-store-dir)"
        )


def _check_weight_memory(model: Model, config: BatchConfig) -> None:
    memory, layers = config.memory, model.expert_layers
    if not memory.weight_memory or memory.weights != "streamed" or not layers:
        return
    is_int8 = config.forward.cpu_weight_dtype == "int8"
    of_a_layer = model.weight_bytes(int8=is_int8).streamable // layers
    if memory.weight_memory < of_a_layer:
        raise ConfigError(
            f"weight_memory is {format_bytes(memory.weight_memory)}, and the experts of a layer take "
            f"{format_bytes(of_a_layer)}: raise --weight-memory, better to two layers' "
            f"({format_bytes(2 * of_a_layer)})"
        )
