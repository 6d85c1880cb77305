"""Owns the KV that prompts share: whole pages by reference count, and the KV indices that lead to them.

Which pages are the same is decided in core/prefixes, and which choices of a request belong together in core/admission.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

import torch

from sgl_batch.core.admission import Admission
from sgl_batch.core.plan import Plan
from sgl_batch.core.prefixes import NO_MATCH, PrefixMatch, PrefixPage, PrefixTree, estimate_shared
from sgl_batch.core.sequence import SequenceState
from sgl_batch.metrics.counters import Counters
from sgl_batch.sglang_adapter.scheduling import protect_prefix, set_prefix, shares_prefix
from sgl_batch.sglang_adapter.types.requests import Request
from sgl_batch.sglang_adapter.types.scheduler import SGLangScheduler


class PromptSharing:
    """The prompt pages of a rank's sequences. A page's KV location is a device page, or a store block.

    `free_kv_locations` frees those of pages that no sequence holds any more, unless their last holder frees them.
    """

    def __init__(
        self, scheduler: SGLangScheduler, counters: Counters, free_kv_locations: Callable[[list[int]], None]
    ) -> None:
        self._scheduler, self._counters, self._free_kv_locations = scheduler, counters, free_kv_locations
        self._allocator = scheduler.token_to_kv_pool_allocator
        self._page_size: int = scheduler.page_size
        self._tree = PrefixTree(scheduler.page_size)

    def estimate_shared(self, queued: Iterable[tuple[SequenceState, Request]], plan: Plan) -> None:
        """Set on the first queued sequences, given with their requests, how many prompt tokens they will share."""
        prompts = ((sequence, self._tokens(request, plan)) for sequence, request in queued)
        estimate_shared(prompts, self._tree, rows=plan.prefill.b_moe)

    def _tokens(self, request: Request, plan: Plan) -> array[int] | None:
        return request.origin_input_ids if plan.share_prefixes and shares_prefix(request) else None

    def match_and_insert(self, unit: Admission, leader: Request, plan: Plan) -> PrefixMatch:
        """Match and hold the pages of a unit's prompt before its prefill, in the order of prefills."""
        tokens = self._tokens(leader, plan)
        if tokens is None and not unit.followers:
            return NO_MATCH
        match = self._tree.match_and_insert(leader.rid, leader.origin_input_ids, listed=tokens is not None)
        shared = unit.leader.shared_tokens = match.shared * self._page_size
        if shared:
            nowhere = torch.arange(shared, device=self._scheduler.device)  # `lay_tables` sets the KV indices
            set_prefix(leader, self._scheduler, nowhere, 0)
            self._counters.add("prompt_tokens_shared", shared)
        return match

    def match_of(self, request: Request) -> PrefixMatch:
        """Return the pages that a request holds."""
        return self._tree.match_of(request.rid)

    def pages_of(self, name: str) -> tuple[PrefixPage, ...]:
        """Return the first pages of a sequence's prompt, which others can share."""
        return self._tree.match_of(name).pages

    def lay_tables(self, requests: list[Request], where: dict[PrefixPage, int]) -> None:
        """Point the tables of a prefill group, whose KV indices are given, to the pages that its prompts share.

        Every sub-batch writes its KV before it attends, and sub-batches run in the order of rows. So a prompt can read
        pages that an earlier prompt computes in the same pass.

        Args:
            requests: the group, in the order of its rows.
            where: the device page of each shared page that was computed before; this adds those that the pass computes.
        """
        size, table = self._page_size, self._scheduler.req_to_token_pool.req_to_token
        for request in requests:
            match = self.match_of(request)
            row, shared = table[request.req_pool_idx], match.shared * size
            computed = min(len(match.pages) * size, request.kv_committed_len)
            own = row[shared:computed:size] // size
            where.update(zip(match.own, own.tolist(), strict=False))
            if shared:
                pages = torch.tensor([where[page] for page in match.found], device=row.device)
                kv_indices = (pages[:, None] * size + torch.arange(size, device=row.device)).flatten()
                row[:shared] = kv_indices.to(row.dtype)
                request.prefix_indices = kv_indices

    def settle(self, requests: list[Request]) -> None:
        """Keep the pages that a prefill group computes at their device pages, and point the group's tables to them.

        A request that ends does not free them. A prompt that is computed in part keeps the pages computed so far.
        """
        matches = [self.match_of(request) for request in requests]
        where = {page: page.kv_location for match in matches for page in match.found if page.has_kv_location}
        self.lay_tables(requests, where)
        for request, match in zip(requests, matches, strict=True):
            computed = request.kv_committed_len // self._page_size
            protect_prefix(request, len(match.pages[:computed]) * self._page_size)
            for page in match.pages[match.shared : computed]:
                page.kv_location = where[page]

    def join(self, leader: Request, follower: Request) -> int:
        """Let a choice hold its leader's full prompt pages before the last token; return how many tokens they have."""
        cached = len(leader.origin_input_ids) - 1
        match = self._tree.match_as(follower.rid, leader.rid, cached // self._page_size)
        self._counters.add("prompt_tokens_shared", cached)
        return len(match.pages) * self._page_size

    def fork(self, leader: Request, followers: list[Request]) -> None:
        """Let `followers` begin after all of the leader's prompt but its last token.

        Call this after the leader's forward pass and before the leader frees anything: the open page is copied from the
        leader's, in every layer.
        """
        cached = len(leader.origin_input_ids) - 1
        pool = self._scheduler.req_to_token_pool
        kv_indices = pool.req_to_token[leader.req_pool_idx, :cached].to(torch.int64)
        for follower in followers:
            shared, own = self.join(leader, follower), kv_indices[:0]
            if cached > shared:
                page = self._allocator.alloc(self._page_size)
                assert page is not None, "admission reserved a page for every follower"
                own = page[: cached - shared]
                self._allocator.get_kvcache().move_kv_cache(own, kv_indices[shared:])
            set_prefix(follower, self._scheduler, torch.cat((kv_indices[:shared], own)), shared)

    def invalidate(self) -> None:
        """Let no later prompt share the pages of the present ones."""
        self._tree.invalidate()

    def leave(self, request_id: str) -> int:
        """Release the pages of a sequence that has ended or left; return how many are freed: no sequence holds them."""
        dropped = self._tree.release(request_id)
        if dropped:
            self._free_kv_locations([page.kv_location for page in dropped if page.has_kv_location])
        return len(dropped)
