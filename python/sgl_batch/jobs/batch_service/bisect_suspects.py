"""Decides which suspects run together next: lines that were in flight when an engine died. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

ALONE_UP_TO = 16


def split_suspects(lines: Sequence[T]) -> list[tuple[T, ...]]:
    """Return the groups to run one after another: two halves, or each line alone where there are at most 16.

    A group that ends without a death clears its lines. A group that kills the engine again is split again. So a line
    that kills engines is found in about log2(lines / 16) + 1 deaths, and most of its neighbours run in large groups.
    """
    if not lines:
        return []
    if len(lines) <= ALONE_UP_TO:
        return [(line,) for line in lines]
    half = (len(lines) + 1) // 2
    return [tuple(lines[:half]), tuple(lines[half:])]
