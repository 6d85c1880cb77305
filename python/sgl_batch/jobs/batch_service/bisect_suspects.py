"""Which of the lines that were in flight when an engine died run together next. Pure: knows no engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

ALONE_UP_TO = 16


def split_suspects(lines: Sequence[T]) -> list[tuple[T, ...]]:
    """The groups to run one after another: halves of many lines, each of a few alone.

    A group that ends without a death clears its lines; one that kills the engine again is split again. So a line that
    kills engines is found in about log2(lines / 16) + 1 deaths, and most of its neighbours run in large groups.
    """
    if not lines:
        return []
    if len(lines) <= ALONE_UP_TO:
        return [(line,) for line in lines]
    half = (len(lines) + 1) // 2
    return [tuple(lines[:half]), tuple(lines[half:])]
