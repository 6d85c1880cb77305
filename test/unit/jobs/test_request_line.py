"""One request line: faults of the envelope by their own codes, seeds, and identity."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_memory_engine import request

from sgl_batch.jobs.line_reader import RawLine
from sgl_batch.jobs.request_line import LineRules, RefusedLine, RequestLine, parse_request_line
from sgl_batch.jobs.seeds import line_seed

# No deadline: a busy machine is no fault of the code.
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

RULES = LineRules(served_model_names=("tiny",), job_seed=11, max_line_bytes=1000)


def parse(data, *, index=4, number=9, claim=lambda custom_id, number: None):
    raw = RawLine(index=index, number=number, data=data, num_bytes=len(data or b""))
    return parse_request_line(raw, RULES, claim)


def without(key):
    return json.dumps({name: value for name, value in request("a").items() if name != key}).encode()


def with_value(**values):
    return json.dumps(request("a") | values).encode()


FAULTS = [
    ("invalid_json_line", b'{"custom_id": "a"', None),
    ("invalid_json_line", b'{"custom_id": "a", "body": {"temperature": NaN}', None),
    ("invalid_number", b'{"custom_id": "a", "body": {"temperature": NaN}}', "a"),
    ("invalid_number", b'{"custom_id": "a", "body": {"temperature": -Infinity}}', "a"),
    ("invalid_number", b'{"custom_id": "a", "body": {"seed": ' + b"9" * 5000 + b"}}", "a"),
    ("invalid_unicode", b'{"custom_id": "a", "body": {"prompt": "\\ud83d"}}', "a"),
    ("invalid_json_line", b"[" * 100_000, None),
    ("invalid_json_line", b'{"custom_id": "\xff"}', None),
    ("invalid_unicode", b'{"custom_id": "\\ud83d"}', None),
    ("invalid_custom_id", b'{"custom_id": ' + b"9" * 5000 + b"}", None),
    ("line_not_an_object", b'["a"]', None),
    ("line_not_an_object", b"5", None),
    ("missing_custom_id", without("custom_id"), None),
    ("invalid_custom_id", with_value(custom_id=7), None),
    ("invalid_custom_id", with_value(custom_id=""), None),
    ("missing_method", without("method"), "a"),
    ("invalid_method", with_value(method="GET"), "a"),
    ("missing_url", without("url"), "a"),
    ("url_not_supported", with_value(url="/v1/embeddings"), "a"),
    ("url_not_supported", with_value(url=["/v1/completions"]), "a"),
    ("missing_body", without("body"), "a"),
    ("invalid_body", with_value(body="hello"), "a"),
    ("model_mismatch", with_value(body={"model": "gpt-4", "prompt": "x"}), "a"),
]


@pytest.mark.parametrize(("code", "data", "custom_id"), FAULTS)
def test_each_fault_of_a_line_has_its_own_code(code, data, custom_id):
    line = parse(data)
    assert isinstance(line, RefusedLine)
    assert (line.error.code, line.custom_id, line.number, line.index) == (code, custom_id, 9, 4)
    assert len(line.error.message) < 400


def test_a_line_over_the_limit_says_both_numbers():
    raw = RawLine(index=0, number=1, data=None, num_bytes=1234)
    line = parse_request_line(raw, RULES, lambda custom_id, number: None)
    assert isinstance(line, RefusedLine)
    assert line.error.code == "line_too_long"
    assert "1,234" in line.error.message
    assert "1,000" in line.error.message


def test_a_repeated_custom_id_names_the_line_that_used_it_first():
    line = parse(with_value(), claim=lambda custom_id, number: 3)
    assert isinstance(line, RefusedLine)
    assert line.error.code == "duplicate_custom_id"
    assert "line 3" in line.error.message


def test_an_unsupported_url_lists_the_supported_ones():
    line = parse(with_value(url="/v1/embeddings"))
    assert "/v1/chat/completions and /v1/completions" in line.error.message


@pytest.mark.parametrize("body", [{}, {"seed": None}])
def test_a_line_without_a_seed_gets_the_one_of_its_index(body):
    line = parse(json.dumps(request("a", **body)).encode(), index=4)
    assert isinstance(line, RequestLine)
    assert line.body["seed"] == line_seed(11, 4)


def test_a_seed_given_in_a_line_stays():
    assert parse(json.dumps(request("a", seed=0)).encode()).body["seed"] == 0


@QUICK
@given(st.binary(max_size=200))
def test_no_bytes_ever_raise(data):
    assert isinstance(parse(data), RefusedLine)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@QUICK
@given(JSON, st.sampled_from(["custom_id", "method", "url", "body"]))
def test_no_value_of_a_field_ever_raises(value, field):
    data = json.dumps(request("a") | {field: value}).encode()
    assert isinstance(parse(data), RequestLine | RefusedLine)


@QUICK
@given(JSON, st.sampled_from(["messages", "prompt", "model", "n", "max_tokens", "stream"]))
def test_no_value_in_a_body_ever_raises(value, field):
    for url in ("/v1/completions", "/v1/chat/completions"):
        body = {"model": "tiny", "prompt": "x", "messages": [{"content": "x"}]} | {field: value}
        data = json.dumps(request("a") | {"url": url, "body": body}).encode()
        assert isinstance(parse(data), RequestLine | RefusedLine)
