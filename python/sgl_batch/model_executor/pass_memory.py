"""Owns what forward passes find free and take of memory, and that streamed experts have the rest.

How many experts that is is decided in core/weight_residency.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_batch.core.device_budget import ModelShape, pass_bytes
from sgl_batch.core.page_ledger import pages_for
from sgl_batch.core.plan_in_force import PlanInForce
from sgl_batch.memory.free_memory import free_bytes, give_back_heap
from sgl_batch.memory.page_advice import HUGE_PAGE_BYTES
from sgl_batch.memory.process_memory import resident_bytes
from sgl_batch.sglang_adapter.forward import is_greedy
from sgl_batch.sglang_adapter.types.batches import ForwardBatch
from sgl_batch.weights.weight_streamer import ResizableSlots, WeightStreamer


class UntouchedPages:
    """The pages of KV that have taken no memory yet: the kernel gives it as they are written, a huge page at a time.

    `parts`: what pages consist of, each [layers * num_pages, ...]. `all_at_once`: pages are written by others than
    forward passes too, so that any number may be touched before the next one.
    """

    def __init__(self, parts: Sequence[torch.Tensor], num_layers: int, page_size: int, *, all_at_once: bool) -> None:
        self._page_size, self._all_at_once = page_size, all_at_once
        self._page_bytes = sum(part.nbytes // (len(part) // num_layers) for part in parts)
        smallest = min(part[0].nbytes for part in parts)
        self._stride = max(1, HUGE_PAGE_BYTES // smallest)
        num_pages = len(parts[0]) // num_layers
        self._touched = torch.zeros(-(-num_pages // self._stride), dtype=torch.bool)

    def claim(self, slots: torch.Tensor) -> int:
        """Bytes that a pass takes which writes to `slots`; they count as taken from now on."""
        left = int((~self._touched).sum())
        if left == 0:
            return 0
        strides = (slots.cpu() // (self._page_size * self._stride)).unique()
        strides = strides[strides < len(self._touched)]  # others are of pages that prefill or streaming has of its own
        new = int((~self._touched[strides]).sum())
        self._touched[strides] = True
        return (left if self._all_at_once else new) * self._stride * self._page_bytes


class PassMemory:
    """What a rank's forward passes find free and take. `budget`: what its process may have; 0: all that is free.

    `streamer`: has the memory that they leave.
    """

    def __init__(
        self,
        streamer: WeightStreamer[ResizableSlots],
        in_force: PlanInForce,
        shape: ModelShape,
        untouched: UntouchedPages,
        *,
        staged_bytes: int,
        budget: int,
        num_ranks: int,
    ) -> None:
        self._streamer, self._in_force, self._shape, self._untouched = streamer, in_force, shape, untouched
        self._staged_bytes, self._budget, self._num_ranks = staged_bytes, budget, num_ranks
        self._last = 0

    def make_room(self, *batches: ForwardBatch) -> None:
        """Before a pass over these batches: streamed experts give back what it needs, or take what it leaves."""
        self._streamer.fit(self.free_bytes, self.working_bytes(*batches))

    def free_bytes(self) -> int:
        """What this process may still take; ranks of one machine share what it has."""
        free = free_bytes() // self._num_ranks
        return min(free, self._budget - resident_bytes()) if self._budget else free

    def working_bytes(self, *batches: ForwardBatch) -> int:
        """What a pass over these batches takes beside what is in memory: an upper bound."""
        working = sum(self._pass_bytes(batch) for batch in batches)
        if working < self._last:
            give_back_heap()  # of a larger pass's tensors, whose memory would be kept for the next ones
        self._last = working
        return working + sum(self._page_bytes(batch) for batch in batches)

    def _pass_bytes(self, forward_batch: ForwardBatch) -> int:
        is_decode = forward_batch.forward_mode.is_decode()
        plan = self._in_force.plan
        phase = plan.decode if is_decode else plan.prefill
        return pass_bytes(
            self._shape,
            rows=len(forward_batch.input_ids),
            sequences=forward_batch.batch_size,
            b_attn=phase.b_attn,
            num_ranks=self._num_ranks,
            greedy=is_greedy(forward_batch),
        )

    def _page_bytes(self, forward_batch: ForwardBatch) -> int:
        is_decode, rows = forward_batch.forward_mode.is_decode(), len(forward_batch.input_ids)
        pages = 0 if is_decode else pages_for(rows, self._in_force.plan.page_size) + forward_batch.batch_size
        return pages * self._staged_bytes + self._untouched.claim(forward_batch.out_cache_loc)
