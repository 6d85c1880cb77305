"""Segments: committed bytes are never changed, and other bytes are worthless."""

from __future__ import annotations

import pytest

from sgl_batch.jobs.job_store.segment import Segments, cut


def test_what_lies_beyond_the_committed_bytes_is_written_over(tmp_path):
    segments, path = Segments(), tmp_path / "s"
    assert segments.write(path, 0, [b"one\n", b"two\n"]) == [0, 4]
    assert segments.write(path, 4, [b"2\n"]) == [4]
    cut(path, 6)
    assert path.read_bytes() == b"one\n2\n"
    segments.close_all()


def test_a_segment_that_lost_committed_bytes_is_not_silently_used(tmp_path):
    cut(tmp_path / "none", 0)
    with pytest.raises(OSError, match="is gone"):
        cut(tmp_path / "none", 3)
    (tmp_path / "s").write_bytes(b"ab")
    with pytest.raises(OSError, match="has 2 bytes, and 3 were committed"):
        cut(tmp_path / "s", 3)


def test_many_segments_do_not_use_up_the_open_files(tmp_path):
    segments = Segments()
    for number in range(200):
        segments.write(tmp_path / str(number), 0, [b"x"])
    assert segments.write(tmp_path / "0", 1, [b"y"]) == [1]
    assert (tmp_path / "0").read_bytes() == b"xy"
    assert len(segments._open) <= 64
    segments.close_all()
