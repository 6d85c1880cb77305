"""Finds a user's function by its name, `module:name`, as flags take it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from sgl_batch.errors import ConfigError


def check_name(flag: str, name: str, example: str) -> None:
    """Raise ConfigError if `name` does not have the form module:name. `flag`: the option's name; `example`: a value."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute.isidentifier()):
        raise ConfigError(f"{flag} is {name!r}; it takes module:name, as in {example}")


def find_function(flag: str, name: str, takes: str) -> Callable[..., Any]:
    """Import the function that `module:name` names. Raises ConfigError if that fails or it is not callable.

    Args:
        flag: The name of the option.
        name: Its value.
        takes: What the function is of, in words.
    """
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        raise ConfigError(
            f"{flag} is {name!r}, and the module {module_name} cannot be imported: {error}; put its directory on "
            "PYTHONPATH, or name another one"
        ) from error
    found: Any = getattr(module, attribute, None)
    if not callable(found):
        what = "has no such name" if found is None else f"has a value of type {type(found).__name__} there"
        raise ConfigError(f"{flag} is {name!r}, and the module {module_name} {what}: name a function of {takes}")
    function: Callable[..., Any] = found
    return function
