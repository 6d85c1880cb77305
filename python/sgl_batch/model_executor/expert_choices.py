"""Owns which experts the router chose for each token of the sequences that ask for it. It decides no choice.

It stands where SGLang has its capturer of routed experts, which keeps them by slot of KV: here KV changes its slots.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch

from sgl_batch.sglang_adapter.types.requests import Request


class ExpertChoices:
    """The choices of the last forward pass, and of each request those of all its positions so far [P, L, K], int32.

    `num_layers` counts the model's layers, also those without experts, whose choices are 0; `num_expert_layers` those
    that tell. A position that is computed again, after a retraction, has the later choice, which may be of new weights.
    """

    def __init__(self, *, num_layers: int, num_expert_layers: int, top_k: int) -> None:
        self._num_layers, self._num_expert_layers, self._top_k = num_layers, num_expert_layers, top_k
        self._told: dict[int, list[torch.Tensor]] = {}
        self._pass: dict[int, list[torch.Tensor]] = {}
        self._records: WeakKeyDictionary[Request, _Record] = WeakKeyDictionary()
        self._at: dict[int, Request] = {}

    # What SGLang says and asks.

    def capture(self, layer_id: int, topk_indices: torch.Tensor) -> None:
        """The choices of the next rows of a layer [T, K]: one expert call may be one of several."""
        self._told.setdefault(layer_id, []).append(topk_indices.to(torch.int32))

    def on_forward_end(self, **_: object) -> None:
        """A forward pass is over; nothing of it is left to do later."""
        self._pass, self._told = self._told, {}

    def get_topk(self, req_pool_idx: int, **_: object) -> torch.Tensor:
        """What a request of the last pass is answered, by its place in the table of slots."""
        return self.of(self._at[req_pool_idx])

    # By sequence.

    def note(self, rows: Iterable[tuple[Request, int, int]]) -> None:
        """Keep what the last pass chose. `rows`: in its order, requests, the first position of each, and how many."""
        told, self._pass, self._at = self._pass, {}, {}
        spans, end = [], 0
        for request, position, length in rows:
            if request.return_routed_experts:
                spans.append((request, position, slice(end, end + length)))
            end += length
        if not spans:
            return
        assert len(told) == self._num_expert_layers, f"{len(told)} of {self._num_expert_layers} layers told a choice"
        choices_TLK = torch.zeros(end, self._num_layers, self._top_k, dtype=torch.int32)
        for layer, parts in told.items():
            choices_TLK[:, layer] = torch.cat(parts)
        for request, position, span in spans:
            self._records.setdefault(request, _Record()).put(position, choices_TLK[span])
            assert request.req_pool_idx is not None, "a request of a pass has a place in the table of slots"
            self._at[request.req_pool_idx] = request

    def of(self, request: Request) -> torch.Tensor:
        """The choices for all tokens of a request but the last, from where it wants them on."""
        tokens = len(request.origin_input_ids) + len(request.output_ids_through_stop)
        start = min(request.routed_experts_start_len, tokens - 1)
        return self._records[request].between(start, tokens - 1)


class _Record:
    """Choices by position, in memory that doubles when it is full."""

    def __init__(self) -> None:
        self._rows: torch.Tensor | None = None
        self._filled = 0

    def put(self, position: int, choices_TLK: torch.Tensor) -> None:
        assert position <= self._filled, f"choices from position {position} on, where {self._filled} are known"
        end = position + len(choices_TLK)
        if self._rows is None or end > len(self._rows):
            grown = choices_TLK.new_zeros(max(end, 2 * self._filled), *choices_TLK.shape[1:])
            if self._rows is not None:
                grown[: self._filled] = self._rows[: self._filled]
            self._rows = grown
        self._rows[position:end] = choices_TLK
        self._filled = max(self._filled, end)

    def between(self, start: int, end: int) -> torch.Tensor:
        assert self._rows is not None, "no pass has told a choice"
        assert end <= self._filled, f"choices to {end} asked, {self._filled} known"
        return self._rows[start:end]
