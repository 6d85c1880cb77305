"""A stop_regex that takes for ever ends its own request; others are found as by Python's own search."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sgl_batch.sglang_adapter import stop_patterns
from sgl_batch.sglang_adapter.stop_patterns import LimitedSearch, limit_stop_patterns


@pytest.fixture
def answer_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A request of SGLang's with a pattern, whose answer so far is a text; SGLang is as before afterwards."""
    module = stop_patterns.schedule_batch_module
    monkeypatch.setattr(module, "re", module.re)
    monkeypatch.setattr(stop_patterns.Req, "_check_str_based_finish", stop_patterns.Req._check_str_based_finish)
    limit_stop_patterns()

    def make(pattern: str, text: str) -> Any:
        request = stop_patterns.Req.__new__(stop_patterns.Req)
        parameters = type("Parameters", (), {"stop_strs": [], "stop_regex_strs": [pattern]})
        request.sampling_params, request.output_ids, request.decoded_text = parameters, [1, 2, 3], text
        request.finished_reason = request.finished_len = None
        request.tail_str = lambda new_accepted_len: text
        request._locate_str_stop_finished_len = lambda new_accepted_len, stop_regex: 3
        return request

    return make


@pytest.mark.parametrize(("pattern", "text"), [(r"\d{3}", "ab123"), (r"^end$", "end"), (r"x+y", "xxxz"), ("", "a")])
def test_a_search_finds_the_match_of_pythons_re(pattern: str, text: str) -> None:
    assert bool(LimitedSearch.search(pattern, text)) == bool(re.search(pattern, text))


def test_a_pattern_that_is_found_stops_its_request(answer_of: Any) -> None:
    request = answer_of(r"\d{3}", "ab123")
    assert request._check_str_based_finish()
    assert request.finished_reason.to_json()["matched"] == r"\d{3}"


def test_a_pattern_that_takes_forever_is_its_requests_own_error(answer_of: Any) -> None:
    request, began = answer_of(r"(a|aa)+$", "a" * 60 + "b"), time.monotonic()
    assert request._check_str_based_finish()
    assert time.monotonic() - began < 30, "Python's own search would take years"
    reason = request.finished_reason.to_json()
    assert (reason["type"], reason["status_code"]) == ("abort", 400)
    assert "takes more than 0.1 s; write a pattern without nested repetitions" in reason["message"]


def test_a_pattern_that_only_python_s_own_search_knows_is_its_request_s_own_error(answer_of: Any) -> None:
    request = answer_of("(?<=a+)b", "aab")
    request.sampling_params.stop_regex_strs = ["(?P<a>x)(?P<a>y"]
    assert request._check_str_based_finish()
    assert "cannot be searched for" in request.finished_reason.to_json()["message"]
