"""Owns a GPU's expert slots, which are filled from host memory on a stream of their own.

Which experts are requested, kept and released is decided elsewhere. Not yet run on a GPU: the order of copies is tested
on a CPU, with copies as early and as late as the stream allows.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from sgl_batch.memory.pinned_memory import pin, unpin
from sgl_batch.weights.expert_slot_table import ExpertSlotTable
from sgl_batch.weights.expert_slots import LoadTotals, SlotTensors
from sgl_batch.weights.host_experts import HostExperts


class PrefetchStream(Protocol):
    """A stream for copies from host memory, apart from the computing stream."""

    def pin(self, memory: torch.Tensor) -> None:
        """Let the device read host memory by itself."""

    def unpin(self, memory: torch.Tensor) -> None: ...

    def begin(self) -> None:
        """Let later copies wait for all that the computing stream was given so far."""

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None: ...

    def mark(self) -> Any:
        """Return a mark of the end of the copies so far."""

    def compute_waits(self, mark: Any) -> None:
        """Let all that the computing stream is given from now on wait for `mark`. The host does not wait."""


class CudaPrefetchStream:
    """PrefetchStream of torch's current GPU."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def pin(self, memory: torch.Tensor) -> None:
        pin(memory, "experts in host memory", "use a machine with more of it")

    def unpin(self, memory: torch.Tensor) -> None:
        self._stream.synchronize()
        unpin(memory)

    def begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)

    def mark(self) -> Any:
        return self._stream.record_event()

    def compute_waits(self, mark: Any) -> None:
        torch.cuda.current_stream().wait_event(mark)


class DeviceExpertSlots:
    """Expert slots on a GPU over experts in host memory. All slots have their memory from the start.

    The stream makes copies in the order in which they were requested: `hurry` and `drop` change nothing.
    """

    def __init__(self, host: HostExperts, tensors: SlotTensors, stream: PrefetchStream) -> None:
        layers, experts = host.w13.shape[:2]
        self.tensors, self._host, self._stream = tensors, host, stream
        self.table = ExpertSlotTable(layers, experts, tensors.count)
        self._marks: dict[int, Any] = {}
        self._asked = 0
        pinned: list[torch.Tensor] = []
        self._close = weakref.finalize(self, _unpin, stream, pinned)
        for memory in (host.w13, host.w2):
            stream.pin(memory)
            pinned.append(memory)

    def ask(self, layer: int, experts: Sequence[int], *, urgent: bool) -> None:
        """Begin to copy experts of a layer into free slots, of which there are enough; neighbours by one copy."""
        if not experts:
            return
        # A slot may still be read by what computes now.
        self._stream.begin()
        asked = sorted(experts)
        slots = self.table.take(layer, asked)
        for expert, slot, count in _runs(asked, slots):
            source, to = slice(expert, expert + count), slice(slot, slot + count)
            self._stream.copy(self.tensors.w13[to], self._host.w13[layer, source])
            self._stream.copy(self.tensors.w2[to], self._host.w2[layer, source])
        self._marks |= dict.fromkeys(slots, self._stream.mark())
        self._asked += len(experts)

    def hurry(self, layer: int, experts: Sequence[int]) -> None:
        """Do nothing: copies keep their order."""

    def drop(self, layer: int, experts: Iterable[int]) -> list[int]:
        """Return no expert: a copy cannot be dropped."""
        return []

    def wait(self, layer: int, experts: Sequence[int]) -> None:
        """Let all that is computed from now on wait until these experts are in their slots."""
        slots = self.table.slots(layer, experts).tolist()
        marks = {id(mark): mark for slot in slots if (mark := self._marks.pop(slot, None)) is not None}
        for mark in marks.values():
            self._stream.compute_waits(mark)

    def free(self, layer: int, experts: Sequence[int]) -> None:
        """Free the slots of experts. Later copies into these slots follow the copies under way."""
        for slot in self.table.release(layer, experts):
            self._marks.pop(slot, None)

    def totals(self) -> LoadTotals:
        return LoadTotals(bytes=self._asked * self._host.expert_bytes, experts=self._asked)

    def close(self) -> None:
        self._close()


def _runs(experts: Sequence[int], slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Cut experts and their slots into runs of consecutive numbers: first expert, first slot, length."""
    start = 0
    for end in range(1, len(experts) + 1):
        goes_on = end < len(experts) and experts[end] == experts[end - 1] + 1 and slots[end] == slots[end - 1] + 1
        if not goes_on:
            yield experts[start], slots[start], end - start
            start = end


def _unpin(stream: PrefetchStream, pinned: list[torch.Tensor]) -> None:
    while pinned:
        stream.unpin(pinned.pop())
