"""Owns the state of a forward pass under way: its parts, its groups, and their rows between two units.

layer_runner computes units, and core/units orders them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sgl_batch.core.units import FUSED, PassShape
from sgl_batch.model_executor.accumulation_buffer import AccumulationBuffer, Buffer
from sgl_batch.model_executor.batch_split import SubBatch
from sgl_batch.sglang_adapter.types.batches import ForwardBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A forward batch of a pass, its rows [start, end) of the pass, and its sub-batches.

    `read`: of how many of its last rows the head reads each sequence; None for all rows.
    """

    batch: ForwardBatch
    span: tuple[int, int]
    sub_batches: list[SubBatch]
    read: Sequence[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRows:
    """The rows of a sub-batch that the last layer keeps (last_rows).

    `span`: where they lie among the kept rows of their group. `index`: their numbers in the sub-batch [rows], int64, or
    None for all of its rows; one row that nobody reads where it keeps none. `attn_metadata`: that of attention in the
    last layer.
    """

    span: tuple[int, int]
    index: torch.Tensor | None
    attn_metadata: object


@dataclass(slots=True, kw_only=True)
class Group:
    """Rows [start, end) of a pass that go to the experts together, as the last layer left them [rows, hidden].

    `batch`: the forward batch that the experts get, the first if there are several. `buffer`: the rows that sub-batches
    yield. `last_buffer`: those that they yield in the last layer, if it keeps fewer.
    """

    span: tuple[int, int]
    batch: ForwardBatch
    hidden: torch.Tensor
    residual: torch.Tensor | None
    buffer: Buffer
    last_buffer: Buffer | None = None


@dataclass(slots=True, kw_only=True)
class GroupPass:
    """A pass under way. `groups`: one, or one for each sub-batch. `most_rows`: the most rows of one expert call.

    `last_rows`: what the last layer keeps of each sub-batch; None for all rows. `calls`: the expert calls of the
    current layer so far.
    """

    shape: PassShape
    layers: Sequence[torch.nn.Module]
    sub_batches: list[SubBatch]
    groups: list[Group]
    most_rows: int
    last_rows: Sequence[LastRows] | None = None
    calls: int = 0

    def __post_init__(self) -> None:
        if self.last_rows is None:
            return
        for group in self.groups:
            own = [kept for number, kept in enumerate(self.last_rows) if self.group_of(number) is group]
            group.last_buffer = AccumulationBuffer(own[-1].span[1])

    def group_of(self, number: int) -> Group:
        """Return the group to which a sub-batch yields."""
        return self.groups[number if len(self.groups) > 1 else 0]

    def kept_of(self, number: int, layer: int) -> LastRows | None:
        """Return what a layer keeps of a sub-batch's rows; None for all."""
        return None if self.last_rows is None or layer < len(self.layers) - 1 else self.last_rows[number]

    def buffer_of(self, group: Group, layer: int) -> Buffer:
        """Return the buffer of what a group's sub-batches yield in a layer."""
        return group.buffer if group.last_buffer is None or layer < len(self.layers) - 1 else group.last_buffer


def shape_of(parts: Sequence[Part], num_layers: int, yield_option: str) -> PassShape:
    """Return the facts that admissible orders of units depend on."""
    after: list[int | None] = []
    for part in parts:
        chained = not part.batch.forward_mode.is_decode()
        for sub in part.sub_batches:
            after.append(len(after) - 1 if chained and sub.number else None)
    return PassShape(num_layers, tuple(after), yield_option)


def groups_of(parts: Sequence[Part], yield_option: str, hidden: torch.Tensor) -> list[Group]:
    """Return the groups of a pass, whose rows are `hidden` at its beginning."""
    sub_batches = [sub for part in parts for sub in part.sub_batches]
    if yield_option == FUSED and len(sub_batches) > 1:
        given = [(sub.span, sub.forward_batch) for sub in sub_batches]
    else:
        given = [((0, len(hidden)), parts[0].batch)]
    groups = []
    for span, batch in given:
        own = hidden if len(given) == 1 else hidden[slice(*span)]
        groups.append(Group(span=span, batch=batch, hidden=own, residual=None, buffer=AccumulationBuffer(len(own))))
    return groups
