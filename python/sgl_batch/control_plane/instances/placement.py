"""Decides how many instances run, on which node each, and on which of its cores. Pure: it knows no Ray.

The instances of a node share no core: each is held to its own by affinity, so that none slows another. Ray counts cores
and GPUs too, but a number of Ray is only a promise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from sgl_batch.errors import ConfigError

AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node that lives. `name` is for people; `cores` are the numbers of those that Ray may use there.

    `draining`: it is about to end, and gets no instance any more.
    """

    node_id: str
    name: str
    cores: tuple[int, ...]
    gpus: int = 0
    draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What one instance takes of a node. `cores` None: an even part of the node's."""

    cores: int | None = None
    gpus: int = 0

    def __str__(self) -> str:
        cores = "a core" if self.cores in (None, 1) else f"{self.cores} cores"
        return cores + (f" and {self.gpus} GPU{'s' if self.gpus > 1 else ''}" if self.gpus else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one instance runs, and on which cores."""

    node_id: str
    node: str
    cores: tuple[int, ...]
    gpus: int = 0


def place_first(nodes: Iterable[Node], count: int | None, needs: Needs) -> list[Place]:
    """Return a place for each of `count` instances on empty nodes; None: as many as the nodes are for.

    That is as many as have their cores or GPUs; without `--cpus-per-instance` and GPUs it is one for each node. The
    instances are spread: each next one goes to the node on which it gets the most. Raises ConfigError where they do not
    fit.
    """
    usable = [one for one in nodes if not one.draining]
    fits = {one.node_id: _most(one, needs, spread_evenly=count is None) for one in usable}
    wanted = sum(fits.values()) if count is None else count
    if sum(fits.values()) < max(wanted, 1):
        raise ConfigError(_too_small(usable, max(wanted, 1), fits, needs))
    numbers = dict.fromkeys(fits, 0)
    for _ in range(wanted):
        open_nodes = [one for one in usable if numbers[one.node_id] < fits[one.node_id]]
        best = max(open_nodes, key=lambda one: len(one.cores) / (numbers[one.node_id] + 1))
        numbers[best.node_id] += 1
    return [place for node in usable for place in _on_one_node(node, numbers[node.node_id], needs)]


def choose_place(
    nodes: Collection[Node], taken: Collection[Place], needs: Needs, before: Place | None = None
) -> Place | None:
    """Return a place for one more instance beside those that run, or None where no node has room.

    `before`: where it was. It stays there where it can, because the answers that it has not given yet lie on that
    node's disk. Else it goes to the node on which it gets the most cores.
    """
    if before is not None:
        same = next((one for one in nodes if one.node_id == before.node_id and not one.draining), None)
        if (
            same is not None
            and set(before.cores) <= set(free_cores(same, taken))
            and before.gpus <= _free_gpus(same, taken)
        ):
            return before
    found = [place for place in (_beside(node, taken, needs) for node in nodes) if place is not None]
    return max(found, key=lambda one: (_was_on(before, one), len(one.cores)), default=None)


def _was_on(before: Place | None, place: Place) -> bool:
    return before is not None and before.node == place.node


def _beside(node: Node, everywhere: Iterable[Place], needs: Needs) -> Place | None:
    """Return a place on a node, or None. Without a given number of cores it has what each other instance there has."""
    taken = [place for place in everywhere if place.node_id == node.node_id]
    free = free_cores(node, taken)
    if needs.cores is not None:
        size = needs.cores
    elif taken:
        size = min(len(place.cores) for place in taken)
    else:
        size = len(node.cores) // max(1, most_instances(node, needs))
    if node.draining or not size or len(free) < size or _free_gpus(node, taken) < needs.gpus:
        return None
    return Place(node_id=node.node_id, node=node.name, cores=free[:size], gpus=needs.gpus)


def most_instances(node: Node, needs: Needs) -> int:
    """Return how many instances a node is for, where their number is not given."""
    return 0 if node.draining else _most(node, needs, spread_evenly=True)


def free_cores(node: Node, taken: Iterable[Place]) -> tuple[int, ...]:
    """Return the cores of a node that no instance has."""
    used = {core for place in taken if place.node_id == node.node_id for core in place.cores}
    return tuple(core for core in node.cores if core not in used)


def _free_gpus(node: Node, taken: Iterable[Place]) -> int:
    return node.gpus - sum(place.gpus for place in taken if place.node_id == node.node_id)


def no_room(nodes: Collection[Node], taken: Iterable[Place], needs: Needs) -> str:
    """Return for people why no further instance fits: what it needs, and what each node has left."""
    places = list(taken)
    rows = []
    for node in nodes:
        left = f"{len(free_cores(node, places))} of {len(node.cores)} cores free"
        if node.gpus:
            left += f", {_free_gpus(node, places)} of {node.gpus} GPUs"
        rows.append(f"{node.name} ({'draining' if node.draining else left})")
    return f"no node has room for an instance of {needs}: {'; '.join(rows) or 'no node is alive'}"


def _most(node: Node, needs: Needs, *, spread_evenly: bool) -> int:
    limits = []
    if needs.gpus:
        limits.append(node.gpus // needs.gpus)
    if needs.cores is not None:
        limits.append(len(node.cores) // needs.cores)
    elif spread_evenly and not needs.gpus:
        limits.append(1)
    return min([*limits, len(node.cores)])


def _on_one_node(node: Node, number: int, needs: Needs) -> list[Place]:
    places, first = [], 0
    for index in range(number):
        size = needs.cores or (len(node.cores) - first) // (number - index)
        cores = node.cores[first : first + size]
        first += size
        places.append(Place(node_id=node.node_id, node=node.name, cores=cores, gpus=needs.gpus))
    return places


def _too_small(nodes: Sequence[Node], wanted: int, fits: dict[str, int], needs: Needs) -> str:
    rows = [
        f"{node.name} has {len(node.cores)} cores"
        + (f" and {node.gpus} GPUs" if node.gpus or needs.gpus else "")
        + f", room for {fits[node.node_id]}"
        for node in nodes
    ]
    asked = "one instance needs" if wanted == 1 else f"--instances {wanted}: each needs"
    return (
        f"the cluster is too small: {asked} {needs}; {'; '.join(rows) or 'no node is alive'}. Ask for fewer with "
        "--instances, give each fewer cores with --cpus-per-instance, or add nodes"
    )
