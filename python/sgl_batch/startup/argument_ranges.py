"""Owns refusing values of SGLang's arguments that it takes and fails on later, when all has been loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgl_batch.errors import ConfigError

_AT_LEAST_ONE = ("context_length", "max_running_requests", "max_total_tokens", "dp_size", "pp_size")
_LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
_DEVICES = ("cpu", "cuda")


def check_ranges(arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for a number or a word that cannot work. None is SGLang's own choice."""
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
