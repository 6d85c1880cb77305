"""Adapts what a request has gathered for its answer, beside its tokens, for migration: as plain data, and put back.

Log probabilities that were sent already do not move: only their number does.
"""

from __future__ import annotations

from typing import Any

from sgl_batch.sglang_adapter.expert_choice import ChoiceRecord, choice_record
from sgl_batch.sglang_adapter.types.requests import Request

__all__ = ["put_back_results", "results_of"]

_KINDS = ("token_logprobs", "top_logprobs", "token_ids_logprobs")
_OUTPUT = tuple(f"output_{kind}_{part}" for kind in _KINDS for part in ("val", "idx"))
_INPUT = tuple(f"input_{kind}_{part}" for kind in _KINDS for part in ("val", "idx"))


def results_of(request: Any) -> dict[str, object]:
    """Return the log probabilities and the choices of experts that a request has so far; empty if it asks for none."""
    found: dict[str, object] = {}
    if request.return_logprob:
        found["logprobs"] = _logprobs_of(request)
    if request.return_routed_experts:
        found["experts"] = {"start": request.routed_experts_start_len, "chosen": _record().written_down(request)}
    return found


def put_back_results(request: Any, results: dict[str, Any]) -> None:
    """Give a rebuilt request the results that `results_of` returned for it."""
    if "logprobs" in results:
        _put_back_logprobs(request, results["logprobs"])
    if "experts" in results:
        request.return_routed_experts = True
        request.routed_experts_start_len = results["experts"]["start"]
        _record().put_back(request, results["experts"]["chosen"])


def _logprobs_of(request: Any) -> dict[str, object]:
    logprob, sent = request.logprob, request.send_output_token_logprobs_offset
    outputs = {name: getattr(logprob, name) for name in _OUTPUT}
    inputs = {} if request.input_logprob_sent else {name: getattr(logprob, name) for name in _INPUT}
    return {
        "top": logprob.top_logprobs_num,
        "token_ids": _plain(logprob.token_ids_logprob),
        "sent": sent,
        "input_sent": request.input_logprob_sent,
        # A kind that was not asked for is empty, and has no values that were sent.
        "outputs": {name: [min(sent, len(values)), _plain(values[sent:])] for name, values in outputs.items()},
        "inputs": {name: _plain(values) for name, values in inputs.items()},
    }


def _put_back_logprobs(request: Any, written: dict[str, Any]) -> None:
    logprob = request.logprob
    request.return_logprob = True
    request.send_output_token_logprobs_offset = written["sent"]
    request.input_logprob_sent = written["input_sent"]
    logprob.top_logprobs_num, logprob.token_ids_logprob = written["top"], written["token_ids"]
    for name, (sent, values) in written["outputs"].items():
        setattr(logprob, name, [None] * sent + values)
    for name, values in written["inputs"].items():
        setattr(logprob, name, values)


def _plain(value: Any) -> Any:
    """Return lists of numbers where SGLang keeps lists, tuples, arrays or tensors."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _record() -> ChoiceRecord[Request]:
    record = choice_record()
    assert record is not None, "an engine that takes requests for choices of experts records them"
    return record
