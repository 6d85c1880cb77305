"""Finds the longest chain through a graph of work, in one pass over its nodes (BatchGen 5.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Work that takes `seconds` once the nodes `after`, which come before it in the graph, have ended.

    Attributes:
        kind: What it is, such as "attention".
        seconds: How long it takes by itself.
        after: Indices of nodes.
        cores: The share of the device's cores that it keeps busy, 0 to 1.
        num_bytes: What it reads or writes in the other tier.
        stream: What it runs on: nodes of one stream run one behind the other.
        layer: Of which layer it is.
    """

    kind: str
    seconds: float
    after: tuple[int, ...] = ()
    cores: float = 1.0
    num_bytes: float = 0.0
    stream: str = ""
    layer: int = 0


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The length of the longest chain, and its nodes in order."""

    seconds: float
    nodes: tuple[int, ...]


def critical_path(graph: Sequence[Node]) -> CriticalPath:
    """Return the longest chain of a graph whose nodes stand in topological order."""
    ends: list[float] = []
    last_before: list[int | None] = []
    for index, node in enumerate(graph):
        assert all(before < index for before in node.after), f"node {index} comes after a later one"
        before = max(node.after, key=ends.__getitem__, default=None)
        last_before.append(before)
        ends.append(node.seconds + (ends[before] if before is not None else 0.0))
    if not ends:
        return CriticalPath(0.0, ())
    at: int | None = max(range(len(ends)), key=ends.__getitem__)
    seconds, chain = ends[at or 0], []
    while at is not None:
        chain.append(at)
        at = last_before[at]
    return CriticalPath(seconds, tuple(reversed(chain)))


def start_times(graph: Sequence[Node]) -> list[float]:
    """Return when each node of a graph in topological order starts, if it starts as soon as it can."""
    starts: list[float] = []
    for node in graph:
        starts.append(max((starts[before] + graph[before].seconds for before in node.after), default=0.0))
    return starts


def busy_s(graph: Sequence[Node]) -> float:
    """Return the seconds in which the device's cores could do all work of a graph, if nothing ever waited."""
    return sum(node.seconds * node.cores for node in graph)
