"""Reading the input: which lines count, their numbers, the limit, and files that are not JSONL."""

from __future__ import annotations

import gzip
import hashlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgl_batch.errors import ConfigError
from sgl_batch.jobs import line_reader
from sgl_batch.jobs.line_reader import check_first_lines, read_lines, scan_input
from sgl_batch.jobs.scratch import StorageError

# No deadline: a busy machine is no fault of the code.
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def read(path, limit=100):
    return [(line.index, line.number, line.data) for line in read_lines(path, limit)]


def test_bom_crlf_and_blank_lines_are_accepted(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf{1}\r\n\r\n  \n{2}\n{3}\n\n \r\n")
    assert read(path) == [(0, 1, b"{1}"), (1, 4, b"{2}"), (2, 5, b"{3}")]
    assert scan_input(path).num_lines == 3


def test_a_last_line_without_newline_counts(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"{1}\n{2}")
    assert read(path) == [(0, 1, b"{1}"), (1, 2, b"{2}")]
    assert scan_input(path).num_lines == 2


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b""])
def test_the_limit_is_the_longest_line_without_its_ending(tmp_path, ending):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"a" * 100 + ending)
    assert read(path) == [(0, 1, b"a" * 100)]


def test_a_longer_line_is_skipped_whole_and_its_size_known(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"a" * 101 + b"\n" + b"b" * 5000 + b"\r\n{3}\n")
    lines = list(read_lines(path, 100))
    assert [(line.number, line.data, line.num_bytes) for line in lines] == [
        (1, None, 101),
        (2, None, 5000),
        (3, b"{3}", 3),
    ]


def test_the_scan_hashes_and_measures_the_whole_file(tmp_path, monkeypatch):
    content = b"\xef\xbb\xbf" + b"{}\n" * 1000
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    monkeypatch.setattr(line_reader, "SCAN_BLOCK_BYTES", 64)
    scan = scan_input(path)
    assert (scan.num_lines, scan.num_bytes) == (1000, len(content))
    assert scan.sha256 == hashlib.sha256(content).hexdigest()


@QUICK
@given(content=st.lists(st.sampled_from([b"\n", b"\r\n", b" ", b"a", b"bb", b"a" * 40])).map(b"".join))
def test_the_scan_counts_the_lines_that_are_read(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("lines") / "in.jsonl"
    path.write_bytes(content)
    lines = read(path, limit=30)
    assert scan_input(path).num_lines == len(lines)
    assert [index for index, _, _ in lines] == list(range(len(lines)))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (gzip.compress(b"{}", mtime=0), "gzip"),
        ("{}".encode("utf-16"), "UTF-16"),
        (b"PK\x03\x04", "zip"),
        (b"PAR1", "Parquet"),
    ],
)
def test_other_formats_are_named(tmp_path, content, what):
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=what):
        scan_input(path)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"a,b\n1,2\n", "none of its first 2 lines is a JSON object"),
        (b"[\n", "its only line is not a JSON object"),
        (b"nothing\n" * 101 + b"{}", "none of its first 100 lines"),
        (b"[" * 100_000, "its only line"),
    ],
)
def test_a_file_without_any_request_is_refused(tmp_path, content, what):
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=what):
        check_first_lines(path, 1 << 20)


@pytest.mark.parametrize("content", [b"", b"no JSON\n{}\n", b"\n{}\n", b"a" * 50 + b"\nb\n"])
def test_a_file_with_a_request_or_a_line_that_is_too_long_to_tell_passes(tmp_path, content):
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    check_first_lines(path, 40)


def test_a_file_that_is_gone_is_a_storage_error(tmp_path):
    with pytest.raises(StorageError, match="reading the input"):
        read(tmp_path / "gone.jsonl")
