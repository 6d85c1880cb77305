"""What a sample of an input says about its lengths."""

from __future__ import annotations

import json

import pytest

from sgl_batch.file_run.input_sample import sample_workload


def completion(prompt, **body):
    return {"url": "/v1/completions", "body": {"prompt": prompt, **body}}


def chat(*contents, **body):
    messages = [{"role": "user", "content": content} for content in contents]
    return {"url": "/v1/chat/completions", "body": {"messages": messages, **body}}


def sampled(tmp_path, *lines, limit=None):
    path = tmp_path / "in.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return sample_workload(path, limit)


@pytest.mark.parametrize(
    ("line", "lengths"),
    [
        (completion("x" * 40, max_tokens=7), (10, 7)),
        (completion([1, 2, 3], max_tokens=7), (3, 7)),
        (completion("x" * 41), (11, 16)),
        (chat("x" * 40, max_tokens=7), (14, 7)),
        (chat("x" * 8, "y" * 8, max_completion_tokens=9), (12, 9)),
        (chat([{"type": "text", "text": "x" * 8}]), (6, 128)),
    ],
)
def test_four_bytes_are_a_token_and_the_limit_is_the_output(tmp_path, line, lengths):
    request = sampled(tmp_path, line).requests[0]
    assert (request.prompt, request.output) == lengths


def test_each_choice_is_a_request(tmp_path):
    found = sampled(tmp_path, completion("abcd", max_tokens=2, n=3), completion("abcd", max_tokens=2))
    assert (len(found.requests), found.count) == (4, 4)


def test_lines_that_cannot_be_read_have_no_lengths(tmp_path):
    found = sampled(tmp_path, "{", "", completion("abcd"), '{"body": 3}', '{"body": {"prompt": {"a": 1}}}')
    assert len(found.requests) == 1
    assert found.count == 4, "lines of unknown length count as the others"
    assert sampled(tmp_path, "nothing", "here") is None


def test_only_the_lines_that_run_count(tmp_path):
    assert sampled(tmp_path, *[completion("abcd")] * 50, limit=5).count == 5


def test_of_a_large_file_the_lines_are_estimated_from_evenly_spaced_places(tmp_path):
    lines = [completion("x" * 400, max_tokens=5)] * 3000 + [completion("x" * 400, max_tokens=50)] * 3000
    found = sampled(tmp_path, *lines)
    assert found.count == pytest.approx(6000, rel=0.02)
    outputs = [request.output for request in found.requests]
    assert outputs == sorted(outputs)
    assert outputs.count(5) == pytest.approx(len(outputs) / 2, rel=0.1)
