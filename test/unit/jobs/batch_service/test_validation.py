"""Which faults fail a whole job, and which only their lines."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest
from running_service import line

from sgl_batch.core.plan_rates import Load
from sgl_batch.jobs.batch_service.line_offsets import LineOffsets
from sgl_batch.jobs.batch_service.validation import StoppedError, ValidationRules, validate_input
from sgl_batch.jobs.line_reader import read_lines

RULES = ValidationRules(
    endpoint="/v1/completions", served_model_names=("tiny", "tiny-2"), max_lines=3000, max_line_bytes=1000
)


def validate(tmp_path, given, stop=None, rules=RULES):
    path = tmp_path / "in.jsonl"
    path.write_bytes(given if isinstance(given, bytes) else "".join(json.dumps(one) + "\n" for one in given).encode())
    found = validate_input(path, tmp_path / "scratch", rules, stop or threading.Event())
    assert not (tmp_path / "scratch").exists()
    return found


@pytest.mark.parametrize(
    ("fault", "code", "param"),
    [
        (b"{not json", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (b'"\xff"', "invalid_json_line", None),
        (json.dumps({**line("x"), "custom_id": None}).encode(), "missing_custom_id", "custom_id"),
        (json.dumps({**line("x"), "custom_id": 3}).encode(), "missing_custom_id", "custom_id"),
        (json.dumps({**line("x"), "method": None}).encode(), "missing_method", "method"),
        (json.dumps({**line("x"), "body": None}).encode(), "missing_body", "body"),
        (json.dumps({**line("x"), "body": [1]}).encode(), "missing_body", "body"),
        (json.dumps({**line("x"), "url": "/v1/chat/completions"}).encode(), "url_mismatch", "url"),
        (json.dumps({**line("x"), "url": None}).encode(), "url_mismatch", "url"),
        (json.dumps(line("good")).encode(), "duplicate_custom_id", "custom_id"),
        (json.dumps(line("x", model="other")).encode(), "model_mismatch", "model"),
        (json.dumps(line("x", model="tiny-2")).encode(), "model_mismatch", "model"),
        (json.dumps(line("x" * 1000)).encode(), "line_too_long", None),
    ],
)
def test_each_fault_of_the_contract_fails_the_job_and_names_its_line(tmp_path, fault, code, param):
    found = validate(tmp_path, json.dumps(line("good")).encode() + b"\n\n" + fault + b"\n")
    assert [(one.code, one.line, one.param) for one in found.faults] == [(code, 3, param)]
    assert found.faults[0].message


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": -1},
        {"prompt": None},
        {"model": None},
        {"model": 3},
        {"stream": True},
        {"custom_logit_processor": "x"},
        {"n": 0},
    ],
)
def test_what_the_endpoint_would_refuse_is_left_to_the_line(tmp_path, body):
    found = validate(tmp_path, [line("a"), {**line("b"), "body": {**line("b")["body"], **body}}])
    assert (found.faults, found.total, found.model) == ((), 2, "tiny")


@pytest.mark.parametrize(
    "odd",
    [
        b'{"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"top_p": NaN}}',
        b'{"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"top_p": -Infinity}}',
        b'{"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"seed": ' + b"9" * 900 * 5 + b"}}",
        b'{"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"prompt": "\\ud83d"}}',
        b'{"custom_id": "\\ud83d"}',
    ],
    ids=["NaN", "Infinity", "digits", "half a pair", "half a pair as the id"],
)
def test_json_that_only_a_lenient_parser_reads_is_left_to_the_line(tmp_path, odd):
    rules = replace(RULES, max_line_bytes=5000)
    found = validate(tmp_path, b"\n".join([json.dumps(line("a")).encode(), odd, odd, b""]), rules=rules)
    repeats = [] if b"x" not in odd else [("duplicate_custom_id", 3)]
    assert [(one.code, one.line) for one in found.faults] == repeats
    assert found.total == 3


@pytest.mark.parametrize("given", [b"", b"\n \r\n", b"\xef\xbb\xbf"])
def test_an_input_without_lines_fails(tmp_path, given):
    assert [(one.code, one.line) for one in validate(tmp_path, given).faults] == [("empty_batch", None)]


def test_too_many_lines_fail(tmp_path):
    assert validate(tmp_path, [line(f"{index}") for index in range(3000)]).faults == ()
    found = validate(tmp_path, [line(f"{index}") for index in range(3001)])
    assert [(one.code, one.line) for one in found.faults] == [("too_many_tasks", None)]


def test_a_byte_order_mark_and_blank_lines_are_accepted(tmp_path):
    found = validate(
        tmp_path, b"\xef\xbb\xbf" + json.dumps(line("a")).encode() + b"\r\n\n" + json.dumps(line("b")).encode()
    )
    assert (found.faults, found.total) == ((), 2)


def test_no_more_than_100_faults_are_listed(tmp_path):
    found = validate(tmp_path, b"x\n" * 500)
    assert [one.line for one in found.faults] == list(range(1, 101))


def test_validation_ends_when_it_is_stopped(tmp_path):
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        validate(tmp_path, [line("a")], stop)


def test_reading_can_start_near_any_line(tmp_path):
    texts = [json.dumps(line(f"{index}")) + "\n" * (1 + index % 3 % 2) for index in range(2500)]
    path = tmp_path / "in.jsonl"
    found = validate(tmp_path, b"\xef\xbb\xbf" + "".join(texts).encode())
    offsets = LineOffsets(found.offsets)
    whole = list(read_lines(path, 1000))
    for index, start in ((0, 0), (999, 0), (1000, 1000), (2499, 2000)):
        rest = list(read_lines(path, 1000, offsets.before(index)))
        assert rest == whole[start:]
    assert len(found.offsets) == 3 * 16


def test_the_load_is_the_lengths_of_all_lines_that_can_be_read(tmp_path):
    given = [
        line("a", "x" * 40, max_tokens=7),
        line("b", "x" * 8, max_tokens=5, n=2),
        line("c", max_tokens=1 << 60),
        line("d", prompt=None, max_tokens="many"),
    ]
    found = validate(tmp_path, given)
    assert not found.faults
    assert found.load == Load(prompt_tokens=10 + 2 * 2, output_tokens=7 + 2 * 5, longest_output=7)
