"""Owns the partial outputs of the tokenizer manager's requests: which requests have one, and bringing it up to date.

A request has one if it computes a request line that can be resumed exactly. `is_repeatable` in the adapter decides
that; the scheduler resumes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from sgl_batch.core.partial_output import PartialOutput
from sgl_batch.requests import partial_output_tag
from sgl_batch.sglang_adapter.tokenizing import is_repeatable
from sgl_batch.sglang_adapter.types.messages import RequestState
from sgl_batch.sglang_adapter.types.requests import TokenizedRequest


class PartialOutputs:
    """Partial outputs by request id. Tokens come from the scheduler as SGLang sends them, every 50 of a sequence."""

    def __init__(self) -> None:
        self._by_rid: dict[str, PartialOutput] = {}
        self._sent: set[str] = set()
        self._is_stopped = False

    @contextmanager
    def of(self, rid: str, partial_output: PartialOutput | None) -> Iterator[None]:
        """Let the request `rid` that is sent inside resume after `partial_output`, and grow it.

        A request that cannot be resumed exactly starts anew, and leaves `partial_output` as it is.
        """
        if partial_output is not None and not self._is_stopped:
            self._by_rid[rid] = partial_output
        try:
            yield
        finally:
            self._by_rid.pop(rid, None)
            self._sent.discard(rid)

    def key_for(self, tokenized: TokenizedRequest) -> str | None:
        """Return the key with the partial output of a request that is about to be sent, or None where it has none."""
        partial_output = self._by_rid.get(tokenized.rid)
        if partial_output is None or not is_repeatable(tokenized):
            return None
        self._sent.add(tokenized.rid)
        return partial_output_tag.encode(partial_output)

    def bring_up_to_date(self, states: Mapping[str, RequestState]) -> None:
        """Append what requests have generated since; `states` are the tokenizer manager's, by request id."""
        for rid in self._sent:
            partial_output, state = self._by_rid[rid], states.get(rid)
            if state is not None and len(state.output_ids) > len(partial_output):
                partial_output.put(len(partial_output), state.output_ids[len(partial_output) :])

    def stop(self) -> None:
        """Empty all partial outputs and take no more, because the weights change.

        An engine that is started again has the old weights, and could not resume them.
        """
        self._is_stopped = True
        for partial_output in self._by_rid.values():
            partial_output.cut(0)
        self._by_rid.clear()
        self._sent.clear()
