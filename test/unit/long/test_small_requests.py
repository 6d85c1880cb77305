"""Owns the rules for the input of a long run, and that its check of the output sees every kind of fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_requests import (
    MAX_PROMPT_CHARACTERS,
    answers_fault,
    custom_id,
    max_tokens,
    num_choices,
    request_line,
    sample_sentences,
    write_requests,
)

from sgl_batch.jobs.line_reader import read_lines
from sgl_batch.jobs.request_line import DEFAULT_MAX_LINE_BYTES, LineRules, RequestLine, parse_request_line

NUM_LINES = 500


@pytest.fixture
def sample(data_dir: Path) -> Path:
    return data_dir / "gsm8k_sample.jsonl"


def answer(index: int, **changes: Any) -> dict[str, Any]:
    """A good answer to the line at `index`, as far as the check looks."""
    choices = num_choices(index)
    body = {"choices": [{}] * choices, "usage": {"completion_tokens": choices * max_tokens(index)}}
    good = {"custom_id": custom_id(index), "response": {"status_code": 200, "body": body}, "error": None}
    return {**good, **changes}


def write_answers(path: Path, answers: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in answers))
    return path


def test_the_sentences_are_short_and_distinct(sample: Path) -> None:
    sentences = sample_sentences(sample)
    assert len(sentences) == len(set(sentences)) > 24
    assert all(0 < len(sentence) <= MAX_PROMPT_CHARACTERS for sentence in sentences)


def test_the_same_number_of_lines_gives_the_same_file_and_more_lines_begin_with_it(
    sample: Path, tmp_path: Path
) -> None:
    few, again, many = (tmp_path / name for name in ("few", "again", "many"))
    write_requests(few, NUM_LINES, sample)
    write_requests(again, NUM_LINES, sample)
    write_requests(many, 2 * NUM_LINES, sample)
    assert few.read_bytes() == again.read_bytes()
    assert many.read_bytes().startswith(few.read_bytes())


def test_every_line_is_a_request_that_the_command_accepts(sample: Path, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    write_requests(path, NUM_LINES, sample)
    rules = LineRules(served_model_names=("default",))
    parsed = [
        parse_request_line(raw, rules, lambda _name, _line: None) for raw in read_lines(path, DEFAULT_MAX_LINE_BYTES)
    ]
    assert len(parsed) == NUM_LINES
    assert all(isinstance(line, RequestLine) for line in parsed)


def test_prompts_differ_and_both_endpoints_sampling_choices_and_logprobs_occur(sample: Path) -> None:
    sentences = sample_sentences(sample)
    lines = [request_line(index, sentences) for index in range(NUM_LINES)]
    prompts = [json.dumps(line["body"].get("prompt", line["body"].get("messages"))) for line in lines]
    assert len(set(prompts)) == NUM_LINES
    assert len({line["url"] for line in lines}) == 2
    assert {line["body"]["temperature"] for line in lines} == {0, 0.8}
    assert {line["body"]["n"] for line in lines} == {1, 2}
    assert any("logprobs" in line["body"] for line in lines)
    assert all(2 <= line["body"]["max_tokens"] <= 4 for line in lines)


def test_an_output_that_answers_each_line_in_order_has_no_fault(tmp_path: Path) -> None:
    path = write_answers(tmp_path / "out.jsonl", [answer(index) for index in range(8)])
    assert answers_fault(path, 8) is None


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0, 1, 2], "3 lines, the input 4"),
        ([0, 2, 1, 3], "line 2 of the output answers line-0000003"),
        ([0, 1, 1, 2, 3], "line 3 of the output answers line-0000002"),
        ([0, 1, 2, 3, 4], "one more than the 4"),
        ([], "0 lines, the input 4"),
    ],
)
def test_a_missing_repeated_swapped_or_extra_line_is_a_fault(order: list[int], message: str, tmp_path: Path) -> None:
    path = write_answers(tmp_path / "out.jsonl", [answer(index) for index in order])
    assert message in (answers_fault(path, 4) or "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"error": {"code": "x"}}, "is no answer"),
        ({"response": {"status_code": 500, "body": {}}}, "is no answer"),
        ({"response": {"status_code": 200, "body": {"choices": [{}, {}]}}}, "2 choices; 1 "),
        (
            {"response": {"status_code": 200, "body": {"choices": [{}], "usage": {"completion_tokens": 5}}}},
            "5 tokens; 1 choices of 1 to 2",
        ),
    ],
)
def test_an_answer_that_does_not_fit_its_request_is_a_fault(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write_answers(tmp_path / "out.jsonl", [answer(0, **change)])
    assert message in (answers_fault(path, 1) or "")
