"""Decides in which order the units of a forward pass run (BatchGen 4.3, Algorithm 1). layer_runner runs them.

A unit is what runs from one yield point to the next. A model family offers one or both of the paper's yield options:
`split` (its option B): a unit is attention of one sub-batch, or the experts of the whole group, which need all
sub-batches of that layer;
`fused` (its option A): a unit is attention and experts of one sub-batch, without accumulation, so that one sub-batch
may be layers ahead of another.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

SPLIT, FUSED = "split", "fused"
YIELD_OPTIONS = (SPLIT, FUSED)

ATTENTION, EXPERTS, ATTENTION_AND_EXPERTS, HEAD = "attention", "experts", "attention and experts", "head"


class Unit(NamedTuple):
    """One unit. `number`: the index of its sub-batch; 0 if the unit is of the whole group."""

    kind: str
    layer: int
    number: int


@dataclass(frozen=True, slots=True)
class PassShape:
    """The properties of a pass that determine the order of its units.

    `after`: by sub-batch, the earlier sub-batch whose KV it may read in the same layer, because both have parts of the
    same prompt; None if there is none, as for all decode rows.
    """

    num_layers: int
    after: tuple[int | None, ...]
    yield_option: str


@lru_cache(maxsize=256)
def static_order(shape: PassShape) -> tuple[Unit, ...]:
    """Return the units of a pass, layer by layer and sub-batch by sub-batch: the order of every pass of the engine.

    Staging memory for KV, exchanges between ranks and captured graphs require this order.
    """
    numbers, units = range(len(shape.after)), list[Unit]()
    for layer in range(shape.num_layers):
        if shape.yield_option == FUSED:
            units += [Unit(ATTENTION_AND_EXPERTS, layer, number) for number in numbers]
        else:
            units += [*(Unit(ATTENTION, layer, number) for number in numbers), Unit(EXPERTS, layer, 0)]
    return (*units, Unit(HEAD, shape.num_layers, 0))


def needs(shape: PassShape, unit: Unit) -> list[Unit]:
    """Return the units that must be done before this one."""
    numbers = range(len(shape.after))
    if unit.kind == EXPERTS:
        return [Unit(ATTENTION, unit.layer, number) for number in numbers]
    needed, before = list[Unit](), unit.layer - 1
    if unit.layer > 0 and shape.yield_option == SPLIT:
        needed.append(Unit(EXPERTS, before, 0))
    elif unit.layer > 0:
        own = numbers if unit.kind == HEAD else [unit.number]
        needed += [Unit(ATTENTION_AND_EXPERTS, before, number) for number in own]
    after = None if unit.kind == HEAD else shape.after[unit.number]
    if after is not None:
        needed.append(Unit(unit.kind, unit.layer, after))
    return needed


def admissible(shape: PassShape, done: Set[Unit]) -> list[Unit]:
    """Return the units that may run next when those of `done` have run."""
    return [
        unit for unit in static_order(shape) if unit not in done and all(need in done for need in needs(shape, unit))
    ]
