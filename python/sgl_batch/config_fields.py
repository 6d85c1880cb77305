"""Owns a field of the configuration that is also a command line flag: its help, and the range of its values."""

from __future__ import annotations

import dataclasses
from typing import Any

from sgl_batch.errors import ConfigError


def flag(
    default: Any,
    help_text: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] | None = None,
    in_bytes: bool = False,
    kind: type = str,
    metavar: str | None = None,
) -> Any:
    """Return a dataclass field that is also a command line flag, with the range of its values.

    `in_bytes`: the value is a size, which may be given as text. `kind`: the type of a value if the default is None.
    `metavar`: the value's name in the help; by default it follows from the type.
    """
    metadata = {
        "help": help_text,
        "minimum": minimum,
        "maximum": maximum,
        "choices": choices,
        "in_bytes": in_bytes,
        "kind": kind if default is None else type(default),
        "metavar": metavar,
    }
    return dataclasses.field(default=default, metadata=metadata)


def check_value(field: dataclasses.Field[Any], value: Any) -> None:
    """Raise ConfigError if a field cannot have this value."""
    kinds: tuple[type, ...] = (field.metadata["kind"],)
    if field.default is None:
        kinds = (*kinds, type(None))
    elif isinstance(field.default, float):
        kinds = (float, int)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ConfigError(f"{field.name} is {value!r}; it takes a value of type {kinds[0].__name__}")
    choices = field.metadata["choices"]
    if choices is not None and value not in choices:
        raise ConfigError(f"{field.name} is {value!r}; it must be one of {', '.join(choices)}")
    low, high = field.metadata["minimum"], field.metadata["maximum"]
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        upper = "" if high is None else f" and at most {high}"
        raise ConfigError(f"{field.name} is {value}; it must be at least {low}{upper}")
