"""Owns measuring the memory that a forward pass finds and needs, so that streamed experts get the rest.

core/weight_residency decides how many experts fit.
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
    """The KV pages that take no memory yet. The operating system gives it when they are first written, by huge pages.

    `parts`: the tensors of which pages consist, each [layers * num_pages, ...]. `all_at_once`: not only forward passes
    write pages, so that any number of pages may be written before the next pass.
    """

    def __init__(self, parts: Sequence[torch.Tensor], num_layers: int, page_size: int, *, all_at_once: bool) -> None:
        self._page_size, self._all_at_once = page_size, all_at_once
        self._page_bytes = sum(part.nbytes // (len(part) // num_layers) for part in parts)
        smallest = min(part[0].nbytes for part in parts)
        self._stride = max(1, HUGE_PAGE_BYTES // smallest)
        num_pages = len(parts[0]) // num_layers
        self._touched = torch.zeros(-(-num_pages // self._stride), dtype=torch.bool)

    def claim(self, kv_indices: torch.Tensor) -> int:
        """Return the bytes that a pass takes by writing KV to `kv_indices`; they count as taken from now on."""
        left = int((~self._touched).sum())
        if left == 0:
            return 0
        strides = (kv_indices.cpu() // (self._page_size * self._stride)).unique()
        strides = strides[strides < len(self._touched)]  # the others are pages of a staging
        new = int((~self._touched[strides]).sum())
        self._touched[strides] = True
        return (left if self._all_at_once else new) * self._stride * self._page_bytes


class PassMemory:
    """Gives the memory that a rank's forward passes do not need to `streamer`.

    `budget`: bytes that the process may have; 0 is all free memory.
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
        """Before a pass over these batches, let streamed experts free the memory that it needs, or take what it
        leaves.
        """
        self._streamer.fit(self.free_bytes, self.working_bytes(*batches))

    def free_bytes(self) -> int:
        """Return the bytes that this process may still take; the ranks of a machine share its free memory."""
        free = free_bytes() // self._num_ranks
        return min(free, self._budget - resident_bytes()) if self._budget else free

    def working_bytes(self, *batches: ForwardBatch) -> int:
        """Return an upper bound of the bytes that a pass over these batches takes additionally."""
        working = sum(self._pass_bytes(batch) for batch in batches)
        if working < self._last:
            give_back_heap()  # the heap would keep the memory of a larger pass's tensors
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
