"""Owns the record of the experts that the router chose for each token, for the requests that ask for it.

It replaces SGLang's capturer of routed experts, which keeps them by KV index: here a token's KV index changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch

from sgl_batch.sglang_adapter.types.requests import Request


class ExpertChoices:
    """The choices of the last forward pass, and those of all positions of each request so far [P, L, K], int32.

    `num_layers` counts all layers of the model; layers without experts have choices of 0. `num_expert_layers` counts
    the layers that choose. A position that is computed again after a retraction has the later choice, which may come
    from new weights.
    """

    def __init__(self, *, num_layers: int, num_expert_layers: int, top_k: int) -> None:
        self._num_layers, self._num_expert_layers, self._top_k = num_layers, num_expert_layers, top_k
        self._captured: dict[int, list[torch.Tensor]] = {}
        self._pass: dict[int, list[torch.Tensor]] = {}
        self._by_request: WeakKeyDictionary[Request, _ChoicesByPosition] = WeakKeyDictionary()
        self._by_request_slot: dict[int, Request] = {}

    # The interface of SGLang's capturer.

    def capture(self, layer_id: int, topk_indices: torch.Tensor) -> None:
        """Keep the choices [T, K] of the next rows of a layer; a layer's rows may come in several calls."""
        self._captured.setdefault(layer_id, []).append(topk_indices.to(torch.int32))

    def on_forward_end(self, **_: object) -> None:
        """End a forward pass: what was captured are its choices."""
        self._pass, self._captured = self._captured, {}

    def get_topk(self, req_pool_idx: int, **_: object) -> torch.Tensor:
        """Return the choices for the answer of a request of the last pass, by its request slot."""
        return self.of(self._by_request_slot[req_pool_idx])

    # By sequence.

    def note(self, rows: Iterable[tuple[Request, int, int]]) -> None:
        """Assign the choices of the last pass to requests.

        `rows`: in the pass's order, each request, its first position in the pass, and its number of positions.
        """
        captured, self._pass, self._by_request_slot = self._pass, {}, {}
        spans, end = [], 0
        for request, position, length in rows:
            if request.return_routed_experts:
                spans.append((request, position, slice(end, end + length)))
            end += length
        if not spans:
            return
        chose = len(captured)
        assert chose == self._num_expert_layers, f"{chose} of {self._num_expert_layers} layers reported a choice"
        choices_TLK = torch.zeros(end, self._num_layers, self._top_k, dtype=torch.int32)
        for layer, parts in captured.items():
            choices_TLK[:, layer] = torch.cat(parts)
        for request, position, span in spans:
            self._by_request.setdefault(request, _ChoicesByPosition()).put(position, choices_TLK[span])
            assert request.req_pool_idx is not None, "a request of a pass has a request slot"
            self._by_request_slot[request.req_pool_idx] = request

    def of(self, request: Request) -> torch.Tensor:
        """Return the choices for all tokens of a request but the last, from `routed_experts_start_len` on."""
        tokens = len(request.origin_input_ids) + len(request.output_ids_through_stop)
        start = min(request.routed_experts_start_len, tokens - 1)
        return self._by_request[request].between(start, tokens - 1)

    # Of a request that moves to another rank.

    def written_down(self, request: Request) -> bytes:
        """Return the choices for all positions of a request so far, [P, L, K] int32 in the machine's byte order."""
        known = self._by_request.get(request)
        return b"" if known is None else known.whole().numpy().tobytes()

    def put_back(self, request: Request, written: bytes) -> None:
        """Record for a request what `written_down` returned for it in another process of the same model."""
        if not written:
            return
        rows = torch.frombuffer(bytearray(written), dtype=torch.int32)
        choices = self._by_request[request] = _ChoicesByPosition()
        choices.put(0, rows.view(-1, self._num_layers, self._top_k))


class _ChoicesByPosition:
    """The choices of one request by position, in memory that doubles when it is full."""

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

    def whole(self) -> torch.Tensor:
        """Return the choices of all positions."""
        return self.between(0, self._filled)

    def between(self, start: int, end: int) -> torch.Tensor:
        assert self._rows is not None, "no pass has reported a choice"
        assert end <= self._filled, f"choices up to position {end} are wanted, and {self._filled} are known"
        return self._rows[start:end]
