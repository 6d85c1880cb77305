"""Owns which requests of the tokenizer manager are lines with a record, and brings records up to date.

Which requests can be gone on with exactly is said by the adapter; the scheduler does so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from sgl_batch.core.partial_output import PartialOutput
from sgl_batch.requests import partial_output_tag as recorded_tokens
from sgl_batch.sglang_adapter.tokenizing import is_repeatable
from sgl_batch.sglang_adapter.types.messages import RequestState
from sgl_batch.sglang_adapter.types.requests import TokenizedRequest


class PartialOutputs:
    """Records by request id. Tokens come from the scheduler as SGLang sends them, every 50 of a sequence."""

    def __init__(self) -> None:
        self._records: dict[str, PartialOutput] = {}
        self._sent: set[str] = set()
        self._is_stopped = False

    @contextmanager
    def of(self, rid: str, record: PartialOutput | None) -> Iterator[None]:
        """Inside, the request `rid` goes on from `record`, which grows with it, if its answer can be repeated."""
        if record is not None and not self._is_stopped:
            self._records[rid] = record
        try:
            yield
        finally:
            self._records.pop(rid, None)
            self._sent.discard(rid)

    def key_for(self, tokenized: TokenizedRequest) -> str | None:
        """The key of a request that is about to be sent: with what is recorded of it."""
        record = self._records.get(tokenized.rid)
        if record is None or not is_repeatable(tokenized):
            return None
        self._sent.add(tokenized.rid)
        return recorded_tokens.encode(record)

    def bring_up_to_date(self, states: Mapping[str, RequestState]) -> None:
        """Note what requests have generated; `states` are the tokenizer manager's, by request id."""
        for rid in self._sent:
            record, state = self._records[rid], states.get(rid)
            if state is not None and len(state.output_ids) > len(record):
                record.put(len(record), state.output_ids[len(record) :])

    def stop(self) -> None:
        """The weights change, and an engine that is started again does not have the new ones: record nothing more."""
        self._is_stopped = True
        for record in self._records.values():
            record.cut(0)
        self._records.clear()
        self._sent.clear()
