"""Owns the names of the order policies; each policy has a file of its own."""

from __future__ import annotations

from collections.abc import Callable

from sgl_batch.core.order.fifo import Fifo
from sgl_batch.core.order.interface import OrderPolicy
from sgl_batch.core.order.longest_first import LongestFirst

_POLICIES: dict[str, Callable[[], OrderPolicy]] = {"fifo": Fifo, "longest-first": LongestFirst}


def make_order(name: str) -> OrderPolicy:
    """Return a new policy. `name`: one of config.ORDERS."""
    return _POLICIES[name]()
