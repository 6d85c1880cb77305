"""A requested abort passes. Another abort is an error with its reason: the request's where a grammar is at fault."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sgl_batch.requests.abort_causes import RequestedAborts
from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.grammars import KeptGrammars, report_grammar_failures
from sgl_batch.sglang_adapter.refusals import EngineAbortError, RefusalError

with bootstrap.importing():
    from sglang.srt.managers.schedule_batch import FINISH_ABORT
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor

KNOWN = ("line", "line_0", "other")


def ended(rid: str, reason: Any) -> dict[str, Any]:
    return {"meta_info": {"id": rid, "finish_reason": reason.to_json() if isinstance(reason, FINISH_ABORT) else reason}}


def judge(aborts: RequestedAborts, rid: str, reason: Any, *, is_stream: bool = False) -> dict[str, Any]:
    out = ended(rid, reason)
    aborts.judge(out, {"ebnf": "root ::= x", "n": 1}, is_stream=is_stream)
    return out["meta_info"]["finish_reason"]


@pytest.mark.parametrize(
    ("asked", "passes"),
    [
        ({"rid": "", "abort_all": True}, {"line", "line_0", "other"}),
        ({"rid": "line", "abort_all": False}, {"line", "line_0"}),
        ({"rid": "line_0", "abort_all": False}, {"line_0"}),
        ({"rid": "", "abort_all": False}, set()),
    ],
)
def test_only_requested_aborts_pass(asked: dict[str, Any], passes: set[str]) -> None:
    aborts = RequestedAborts()
    aborts.note(asked["rid"], KNOWN, abort_all=asked["abort_all"])
    for rid in KNOWN:
        if rid in passes:
            assert judge(aborts, rid, FINISH_ABORT())["status_code"] is None
        else:
            with pytest.raises(EngineAbortError, match="the engine ended the request: Aborted"):
                judge(aborts, rid, FINISH_ABORT())


def test_a_requested_abort_counts_once_and_is_forgotten_with_its_request() -> None:
    aborts = RequestedAborts()
    aborts.note("", KNOWN, abort_all=True)
    judge(aborts, "line", {"type": "length"})
    with pytest.raises(EngineAbortError):
        judge(aborts, "line", FINISH_ABORT())
    aborts.note("x", ["x"], abort_all=False)
    with pytest.raises(EngineAbortError):
        judge(aborts, "other", FINISH_ABORT("no room"))


def test_an_unrequested_abort_ends_a_stream_with_an_error_status() -> None:
    assert judge(RequestedAborts(), "line", FINISH_ABORT("no room"), is_stream=True)["status_code"] == 500
    invalid = FINISH_ABORT("x", 400, "invalid_grammar")
    assert judge(RequestedAborts(), "line", invalid, is_stream=True)["status_code"] == 400


@pytest.mark.parametrize(
    "reason",
    [
        FINISH_ABORT("dead end", 400, "invalid_grammar"),
        FINISH_ABORT("Failed to compile ebnf grammar: x", 400, "BadRequestError"),
        FINISH_ABORT("Grammar-based generation (json_schema, ...) is not supported", 400, "BadRequestError"),
    ],
)
def test_a_grammar_fault_refuses_the_request_and_names_the_field(reason: Any) -> None:
    with pytest.raises(RefusalError) as refused:
        judge(RequestedAborts(), "line", reason)
    assert (refused.value.code, refused.value.param) == ("invalid_grammar", "ebnf")
    assert str(refused.value) == reason.message


def test_other_refusals_of_a_scheduler_pass_to_sglang() -> None:
    assert judge(RequestedAborts(), "line", FINISH_ABORT("too long", 400, "BadRequestError"))["message"] == "too long"


class DeadEnd:
    """A grammar that takes no token."""

    finished = False

    def accept_token(self, token: int) -> None:
        raise ValueError("not accepted")


def test_a_request_whose_grammar_allows_no_token_ends_with_that_reason() -> None:
    fields = dict.fromkeys(SchedulerBatchResultProcessor.__dataclass_fields__)
    scheduler = SimpleNamespace(batch_result_processor=SchedulerBatchResultProcessor(**fields))
    report_grammar_failures(scheduler)
    request = SimpleNamespace(
        rid="r", grammar=DeadEnd(), to_finish=None, output_ids=[3, 0], sampling_params=None, finished=lambda: False
    )
    scheduler.batch_result_processor._accept_grammar_tokens(request, 0)
    assert request.to_finish.to_json() == {
        "type": "abort",
        "message": "its grammar allows no token after the 1 generated ones, and may not end there",
        "status_code": 400,
        "err_type": "invalid_grammar",
    }
    request.to_finish = None
    scheduler.batch_result_processor._apply_prefill_grammar(req=request, next_token_id=0)
    assert request.to_finish.status_code == 400


def test_compiled_grammars_are_kept_in_limited_memory() -> None:
    dropped: list[int] = []
    kept = KeptGrammars(100, lambda: dropped.append(1))
    for number in range(20):
        kept["regex", str(number)] = SimpleNamespace(ctx=SimpleNamespace(memory_size_bytes=30))
        assert len(kept) <= 3
    assert ("regex", "19") in kept
    assert dropped
    kept["regex", "huge"] = SimpleNamespace(ctx=SimpleNamespace(memory_size_bytes=1000))
    assert list(kept) == [("regex", "huge")]
