"""Decides why a request was aborted: a client asked for it, its grammar could not go on, or the engine ended it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sgl_batch.sglang_adapter.grammars import GRAMMAR_KINDS, INVALID_GRAMMAR, is_grammar_failure
from sgl_batch.sglang_adapter.refusals import EngineAbortError, RefusalError
from sgl_batch.sglang_adapter.types.messages import Answer


class RequestedAborts:
    """The ids of requests whose abort was requested and that have not ended yet."""

    def __init__(self) -> None:
        self._rids: set[str] = set()

    def note(self, rid: str, known: Collection[str], *, abort_all: bool) -> None:
        """Note a request to abort all of the `known` ids, or those that begin with `rid`."""
        self._rids &= set(known)
        self._rids.update(one for one in known if abort_all or (rid and one.startswith(rid)))

    def judge(self, out: Answer, sampling_params: object, *, is_stream: bool) -> None:
        """Let an answer pass that was not aborted, or whose abort was requested.

        Raises RefusalError where a grammar is at fault, and EngineAbortError for an abort without a reason. A stream
        has begun already: its last part gets status 500 instead.
        """
        reason = out["meta_info"]["finish_reason"]
        is_asked = out["meta_info"]["id"] in self._rids
        self._rids.discard(out["meta_info"]["id"])
        if reason.get("type") != "abort":
            return
        if is_grammar_failure(reason) and not is_stream:
            raise RefusalError(reason["message"], code=INVALID_GRAMMAR, param=_grammar_of(sampling_params))
        if reason.get("status_code") is None and not is_asked:
            if not is_stream:
                raise EngineAbortError(reason.get("message") or "it does not say why")
            reason["status_code"] = 500


def _grammar_of(sampling_params: object) -> str | None:
    given = sampling_params if isinstance(sampling_params, Mapping) else {}
    return next((kind for kind in GRAMMAR_KINDS if given.get(kind) is not None), None)
