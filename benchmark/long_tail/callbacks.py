"""Owns the callback of mode `migration`. Engines find it as `long_tail.callbacks:nothing_moves`."""

from __future__ import annotations

from sgl_batch.core.actions import Actions
from sgl_batch.core.group_view import GroupView


def nothing_moves(_: GroupView) -> Actions:
    """Leave the last sequences where they are."""
    return ()
