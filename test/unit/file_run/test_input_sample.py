"""What a sample of an input says about its lengths."""

from __future__ import annotations

import json

import pytest

from sgl_batch.errors import ConfigError
from sgl_batch.file_run.input_sample import sample_table, sample_workload
from sgl_batch.file_run.text_tokens import by_tokenizer
from sgl_batch.jobs.tables.row_lines import RowRules
from sgl_batch.planner.workload import Request


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


def test_with_a_tokenizer_its_tokens_count_and_the_rest_of_a_long_text_in_proportion(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"word": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    count = by_tokenizer(tmp_path)
    assert [count("a word of five words"), count(""), count("\ud800 x")] == [5, 0, 2]
    assert count("word " * 10_000) == pytest.approx(10_000, rel=0.01)
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(completion("three small words", max_tokens=5)))
    found = sample_workload(path, None, count)
    assert (found.requests, found.source) == ([Request(3, 5)], "estimated from 1 lines of the input")
    assert sample_workload(path, None).source.endswith(", four bytes a token")


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_without_a_tokenizer_that_can_be_loaded_bytes_count(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    assert by_tokenizer(tmp_path) is None
    assert by_tokenizer(None) is None


def test_the_first_rows_of_a_table_are_its_sample(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": ["x" * 40] * 300 + ["x" * 80] * 300}), path)
    found = sample_table(path, RowRules(model="m", body={"max_tokens": 3}), None)
    assert (found.count, len(found.requests), found.requests[0]) == (600, 256, Request(10, 3))
    assert "256 rows of the input" in found.source
    assert sample_table(path, RowRules(model="m"), 100).count == 100
    with pytest.raises(ConfigError, match="no column other"):
        sample_table(path, RowRules(model="m", prompt_column="other"), None)
