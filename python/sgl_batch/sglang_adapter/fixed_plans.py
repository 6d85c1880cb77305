"""Plans of SGLang's Triton attention for a decode group, at addresses that stay, for graphs that were captured there.

Not yet run on a GPU; tested on a CPU, under Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch


class FixedPlans:
    """The plans of a group's sub-batches as parts of one: all that `num_rows` sequences attend to, end to end.

    Each sub-batch's share is a view, so that together they are bounded by the `num_slots` of the pool, wherever one
    ends and the next begins.
    """

    def __init__(self, num_rows: int, num_slots: int, device: torch.device) -> None:
        self._most_slots = num_slots
        self._kv_indptr = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        self._kv_indices = torch.zeros(num_slots + num_rows, dtype=torch.int64, device=device)
        self._num_kv_splits = torch.ones(num_rows, dtype=torch.int32, device=device)
        self._ordinals = torch.arange(1, num_rows + 1, dtype=torch.int32, device=device)
        self._last: Any = None

    @property
    def num_bytes(self) -> int:
        parts = (self._kv_indptr, self._kv_indices, self._num_kv_splits, self._ordinals)
        return sum(part.nbytes for part in parts)

    def load(self, plans: Sequence[tuple[Any, int]], padded: int) -> bool:
        """Take over a pass's plans, each with its number of slots; rows up to `padded` attend to slot 0.

        False, and nothing is taken, where they have more slots than the pool: prompts that share pages may.
        """
        if sum(count for _, count in plans) > self._most_slots:
            return False
        row = slot = 0
        for plan, count in plans:
            end = row + len(plan.num_kv_splits)
            torch.add(plan.kv_indptr, slot, out=self._kv_indptr[row : end + 1])
            self._kv_indices[slot : slot + count] = plan.kv_indices[:count]
            self._num_kv_splits[row:end] = plan.num_kv_splits
            row, slot, self._last = end, slot + count, plan
        if row < padded:
            torch.add(self._ordinals[: padded - row], slot, out=self._kv_indptr[row + 1 : padded + 1])
            self._kv_indices[slot : slot + padded - row].zero_()
            self._num_kv_splits[row:padded].fill_(1)
        return True

    def plan(self, start: int, rows: int) -> Any:
        """The plan for rows [start, start + rows), with scratch memory of its own."""
        assert self._last is not None, "plans have been loaded"
        return replace(
            self._last,
            attn_logits=self._last.attn_logits.new_empty((rows, *self._last.attn_logits.shape[1:])),
            attn_lse=self._last.attn_lse.new_empty((rows, *self._last.attn_lse.shape[1:])),
            num_kv_splits=self._num_kv_splits[start : start + rows],
            kv_indptr=self._kv_indptr[start : start + rows + 1],
            kv_indices=self._kv_indices,
        )
