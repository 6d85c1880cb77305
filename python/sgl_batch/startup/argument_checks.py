"""Owns refusing values of arguments that cannot work, before anything starts: ranges of SGLang's, and memory budgets.

SGLang takes such values and fails on them later, when everything is loaded. What fits on a device is found at its load.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from sgl_batch.byte_sizes import format_bytes
from sgl_batch.config import MODEL_WEIGHTS, ForwardConfig, MemoryConfig, RankConfig, field_names
from sgl_batch.errors import ConfigError
from sgl_batch.memory.free_memory import machine_bytes

_AT_LEAST_ONE = ("context_length", "max_running_requests", "max_total_tokens", "dp_size", "pp_size")
_LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
_DEVICES = ("cpu", "cuda")


def check_names(arguments: Mapping[str, object], sglang_names: Collection[str]) -> None:
    """Raise ConfigError for an argument that neither SGLang nor this package has, with the name that may be meant."""
    for name in arguments:
        if name not in sglang_names:
            raise ConfigError(f"there is no argument {name}{did_you_mean(name, [*sglang_names, *field_names()])}")


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Return the end of a message about an unknown name: the one that may be meant, or nothing."""
    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def check_ranges(arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for a number or a word that cannot work. None leaves the choice to SGLang."""
    for name in _AT_LEAST_ONE:
        value = arguments.get(name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    fraction = arguments.get("mem_fraction_static")
    if fraction is not None and not 0 < fraction < 1:
        raise ConfigError(f"mem_fraction_static is {fraction}; it is a share of memory, more than 0 and less than 1")
    for name, words in (("log_level", _LOG_LEVELS), ("device", _DEVICES)):
        value = arguments.get(name)
        if value is not None and str(value).lower() not in words:
            raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(words)}")


def check_weights(forward: ForwardConfig, memory: MemoryConfig, *, on_cpu: bool) -> None:
    """Raise ConfigError for number types and memory of weights that do not go together."""
    if memory.weight_memory and memory.weights == "resident":
        raise ConfigError("weight_memory is given, and weights are resident: give --weights streamed too")
    if forward.cpu_weight_dtype in MODEL_WEIGHTS:
        return
    asked = f"cpu_weight_dtype is {forward.cpu_weight_dtype!r}"
    if not on_cpu:
        raise ConfigError(f"{asked}, which is for a CPU: leave it out, and see SGLang's --quantization")
    if forward.cpu_weight_dtype == "lossless12" and memory.weights == "streamed":
        raise ConfigError(
            f"{asked}, and weights are streamed; they are read as they lie in the files: leave out one of them"
        )


def check_activations(forward: ForwardConfig, memory: MemoryConfig) -> None:
    """Raise ConfigError where rows are to be rounded to int8 and would not meet int8 weights in memory."""
    if forward.cpu_activations == "model":
        return
    asked = f"cpu_activations is {forward.cpu_activations!r}"
    if forward.cpu_weight_dtype != "int8":
        raise ConfigError(
            f"{asked}, and cpu_weight_dtype is {forward.cpu_weight_dtype!r}; int8 rows meet int8 weights: give "
            "cpu_weight_dtype 'int8' too"
        )
    if memory.weights == "streamed":
        raise ConfigError(
            f"{asked}, and weights are streamed; streamed experts are packed for rows in the model's number type: "
            "leave out cpu_activations or weights"
        )


def check_callbacks(ranks: RankConfig, *, num_ranks: int) -> None:
    """Raise ConfigError for callbacks that decide for several ranks, where they would not be asked."""
    for flag, name in ranks.callbacks.items():
        if name is not None and num_ranks < 2:
            raise ConfigError(
                f"{flag} is {name!r}, and the engine has one rank; it decides for several: leave it out, or give "
                "--tp N --dp N --ep N --enable-dp-attention"
            )
        if name is not None and ranks.migration == "always":
            raise ConfigError(
                f"{flag} is {name!r}, and migration is 'always', which moves every sequence without asking it (for "
                "tests): leave one of them out"
            )


def check_budgets(memory: MemoryConfig, *, on_cpu: bool, num_ranks: int) -> None:
    """Raise ConfigError where a budget cannot hold what is asked of it, or the machine cannot hold the budgets."""
    store = memory.store_in_memory_bytes
    if memory.host_memory and store > memory.host_memory:
        raise ConfigError(
            f"kv_store_bytes is {format_bytes(store)}, more than host_memory ({format_bytes(memory.host_memory)}) "
            "allows; lower --kv-store-bytes, raise --host-memory, or name a directory for the store (--kv-store-dir)"
        )
    machine = machine_bytes()
    if on_cpu and memory.device_memory and num_ranks * memory.device_memory + store > machine:
        too = f" and a host KV store in memory ({format_bytes(store)})" if store else ""
        raise ConfigError(
            f"device_memory ({format_bytes(memory.device_memory)} for each of {num_ranks} rank(s)){too} "
            f"{'are' if store else 'is'} more than the machine has, {format_bytes(machine)}; "
            f"lower --device-memory{' or --kv-store-bytes' if store else ''}"
        )
