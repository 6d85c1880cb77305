"""Owns finding the functions that a user names to decide for several ranks. core/group_callbacks says when they do."""

from __future__ import annotations

from sgl_batch.config import RankConfig
from sgl_batch.core.group_callbacks import Callbacks
from sgl_batch.core.group_view import Callback
from sgl_batch.named_function import find_function


def find_callback(flag: str, name: str) -> Callback:
    """Import the function that `module:name` names. Raises ConfigError if that fails or it is not callable.

    Args:
        flag: `on_refill` or `on_long_tail`.
        name: Its value.
    """
    return find_function(flag, name, "a view of all ranks")


def callbacks_of(config: RankConfig) -> Callbacks:
    """Return what decides for several ranks. Raises ConfigError for a name of no function."""
    names = {flag: name for flag, name in config.callbacks.items() if name is not None}
    return Callbacks(names=names, **{flag: find_callback(flag, name) for flag, name in names.items()})
