"""Owns the KV that choices of one request share: full pages by reference count, the open page by copy.

Which choices belong together is decided in core/admission.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sgl_batch.sglang_adapter.scheduling import give_prefix, protect_prefix


@dataclass(slots=True, kw_only=True)
class SharedPrompt:
    """Slots of the full pages of one prompt, and the request ids that still read them."""

    slots: torch.Tensor
    readers: set[str]


class PromptSharing:
    """Forks followers from a leader whose prompt has just been computed, and frees shared pages after the last."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._allocator = scheduler.token_to_kv_pool_allocator
        self._page_size: int = scheduler.page_size
        self._shared: dict[str, SharedPrompt] = {}

    def fork(self, group: str, leader: Any, followers: list[Any]) -> None:
        """Let `followers` begin behind all of the leader's prompt but its last token.

        Must run between the leader's forward pass and the release of anything it holds: the open page is
        copied from the leader's, in every layer.
        """
        cached = len(leader.origin_input_ids) - 1
        shared = cached // self._page_size * self._page_size
        pool = self._scheduler.req_to_token_pool
        slots = pool.req_to_token[leader.req_pool_idx, :cached].to(torch.int64)
        for follower in followers:
            own = slots[:0]
            if cached > shared:
                page = self._allocator.alloc(self._page_size)
                assert page is not None, "admission reserved a page for every follower"
                own = page[: cached - shared]
                self._allocator.get_kvcache().move_kv_cache(own, slots[shared:])
            give_prefix(follower, self._scheduler, torch.cat((slots[:shared], own)), shared)
        protect_prefix(leader, shared)
        readers = {request.rid for request in (leader, *followers)}
        self._shared[group] = SharedPrompt(slots=slots[:shared].clone(), readers=readers)

    def leave(self, group: str, request_id: str) -> bool:
        """A choice has finished; the last reader frees the shared pages. Returns whether it was the last."""
        prompt = self._shared.get(group)
        if prompt is None or request_id not in prompt.readers:
            return False
        prompt.readers.remove(request_id)
        if prompt.readers:
            return False
        self._allocator.free(prompt.slots)
        del self._shared[group]
        return True
