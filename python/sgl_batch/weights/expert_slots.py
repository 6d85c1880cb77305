"""Owns the expert slots in a CPU's memory, and the threads that read experts into them.

Which experts are requested, kept and released, and how many slots are in use, is decided elsewhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sgl_batch.errors import EngineError
from sgl_batch.kernel_loader import expert_loader_kernels
from sgl_batch.memory.free_memory import give_back
from sgl_batch.weights.expert_checkpoint import ExpertLocations
from sgl_batch.weights.expert_slot_table import ExpertSlotTable
from sgl_batch.weights.four_bit_numbers import FourBitNumbers


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTensors:
    """The tensors of expert slots: `w13` [S, 2I, M] and `w2` [S, M, I]. Packed on a CPU; int8 weights have scales.

    Those of 4 and 8 bits have rows of other sizes, with their scales (layers/small_weights).
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scales: torch.Tensor | None = None
    w2_scales: torch.Tensor | None = None

    @property
    def count(self) -> int:
        return len(self.w2)

    @property
    def parts(self) -> list[torch.Tensor]:
        return [part for part in (self.w13, self.w2, self.w13_scales, self.w2_scales) if part is not None]

    @property
    def slot_bytes(self) -> int:
        return sum(part[0].nbytes for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots once each holds an expert."""
        return self.count * self.slot_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTotals:
    """Bytes and experts read since start."""

    bytes: int
    experts: int


class ExpertSlots:
    """Expert slots that the native loader fills from the checkpoint's files.

    An expert is requested (`ask`), awaited (`wait`), computed with, and released (`free`); `table` says which slot it
    has. The caller makes room first: it asks for no more experts than `table.num_free`. A slot takes memory from its
    first expert on. The first `table.num_slots` slots are in use: all, until `resize` changes that.
    """

    def __init__(
        self,
        locations: ExpertLocations,
        tensors: SlotTensors,
        *,
        num_threads: int,
        direct: bool = True,
        keeps_cached: bool = False,
    ) -> None:
        """Open the files and start the threads.

        Args:
            locations: where the experts lie in the files.
            tensors: the slots' memory, to which the threads write until `close`.
            num_threads: how many threads read and pack.
            direct: whether to read past the page cache where the file system allows it.
            keeps_cached: whether what is read through the page cache stays there.

        Raises:
            EngineError: a file cannot be opened.
        """
        layers, experts = locations.file_offsets.shape[:2]
        scales = locations.scales
        self.tensors, self._file_offsets = tensors, locations.file_offsets
        stages = locations.transposed and tensors.w13.dtype != locations.dtype
        self.staging_bytes = num_threads * 2 * locations.hidden * locations.inter * locations.dtype.itemsize * stages
        """Bytes that the threads hold besides slots: a stacked expert is rounded to int8 when all of it is read."""
        self.table = ExpertSlotTable(layers, experts, tensors.count)
        self._touched = set[int]()
        with _read_errors():
            self._loader: Any = expert_loader_kernels().start_expert_loader(
                locations.files,
                direct=direct,
                keeps_cached=keeps_cached,
                w13=tensors.w13,
                w2=tensors.w2,
                w13_scales=tensors.w13_scales,
                w2_scales=tensors.w2_scales,
                stored=locations.dtype,
                transposed=locations.transposed,
                num_threads=num_threads,
                **({} if scales is None else {"stored_scales": scales.values, "block": scales.block}),
                four_bits=None if locations.four_bits is None else _for_loader(locations.four_bits),
            )
        # The threads end before the memory that they read and write is freed.
        self._close = weakref.finalize(self, _close, self._loader, [tensors, scales])

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that slots have taken."""
        return len(self._touched) * self.tensors.slot_bytes

    def resize(self, num_slots: int) -> list[tuple[int, int, bool]]:
        """Use only the first `num_slots` slots. Experts in the others are released, and the memory is given back.

        Waits for the reads under way into slots that are given back.

        Returns:
            The released experts, as (layer, expert, whether it had been read).
        """
        assert 0 < num_slots <= self.tensors.count, f"{num_slots} of {self.tensors.count} slots"
        gone: list[tuple[int, int, bool]] = []
        for layer, slot_of_E in enumerate(self.table.slot_of):
            experts = (slot_of_E >= num_slots).nonzero().flatten().tolist()
            dropped = set(self.drop(layer, experts))
            self.free(layer, [expert for expert in experts if expert not in dropped])
            gone.extend((layer, expert, expert not in dropped) for expert in experts)
        self._touched = {slot for slot in self._touched if slot < num_slots}
        for part in self.tensors.parts:
            give_back(part[num_slots : self.table.num_slots])
        self.table.resize(num_slots)
        return gone

    @property
    def direct(self) -> bool:
        """Whether the files are read past the page cache."""
        return bool(self._loader.direct())

    def ask(self, layer: int, experts: Sequence[int], *, urgent: bool) -> None:
        """Begin to read experts of a layer into free slots, of which there are enough. Does not wait.

        Args:
            layer: the layer, counted among the layers with experts.
            experts: experts that have no slot.
            urgent: whether they are read before all experts that are not urgent.
        """
        if not experts:
            return
        slots = self.table.take(layer, experts)
        self._touched.update(slots)
        self._loader.submit(torch.tensor(slots), self._file_offsets[layer, torch.tensor(experts)].contiguous(), urgent)

    def hurry(self, layer: int, experts: Sequence[int]) -> None:
        """Make requested experts urgent."""
        self._loader.hurry(self.table.slots(layer, experts))

    def drop(self, layer: int, experts: Iterable[int]) -> list[int]:
        """Cancel the reads of these experts that have not begun; return those experts, which have no slot now."""
        asked = list(experts)
        left_out: list[bool] = self._loader.drop(self.table.slots(layer, asked)).tolist()
        dropped = [expert for expert, out in zip(asked, left_out, strict=True) if out]
        self.table.release(layer, dropped)
        return dropped

    def wait(self, layer: int, experts: Sequence[int]) -> None:
        """Block until these experts are in their slots. Raises EngineError that names a file that cannot be read."""
        with _read_errors():
            self._loader.wait(self.table.slots(layer, experts))

    def free(self, layer: int, experts: Sequence[int]) -> None:
        """Release experts and free their slots, after waiting for the reads under way."""
        self.wait(layer, experts)
        self.table.release(layer, experts)

    def totals(self) -> LoadTotals:
        size, experts, *_ = self._loader.totals()
        return LoadTotals(bytes=size, experts=experts)

    def close(self) -> None:
        self._close()


def _for_loader(numbers: FourBitNumbers) -> Any:
    kernels = expert_loader_kernels()
    return kernels.FourBitNumbers(**{**asdict(numbers), "layout": kernels.FourBitLayout[numbers.layout]})


@contextmanager
def _read_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise EngineError(f"weights of the model could not be read: {str(error).splitlines()[0]}") from error


def _close(loader: Any, tensors: list[object]) -> None:
    loader.close()
    tensors.clear()
