"""A file of whole lines."""

from __future__ import annotations

import resource
import signal

import pytest

from sgl_batch.file_run.line_file import LineFile
from sgl_batch.jobs.scratch import StorageError


def test_what_is_appended_can_be_read_at_once(tmp_path):
    file = LineFile(tmp_path / "out.jsonl")
    file.append([b"1\n", b"2\n"])
    assert file.path.read_bytes() == b"1\n2\n"
    file.append([b"3\n"])
    assert file.path.read_bytes() == b"1\n2\n3\n"
    assert file.num_lines == 3
    file.close()


def test_a_file_without_lines_is_not_made(tmp_path):
    file = LineFile(tmp_path / "out.errors.jsonl")
    file.append([])
    file.close()
    assert not file.path.exists()


def test_an_existing_file_is_not_overwritten_unasked(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"precious\n")
    with pytest.raises(StorageError, match=r"creating .*out\.jsonl failed"):
        LineFile(path).append([b"1\n"])
    assert path.read_bytes() == b"precious\n"
    file = LineFile(path, overwrite=True)
    file.append([b"1\n"])
    file.close()
    assert path.read_bytes() == b"1\n"


def test_a_full_disk_leaves_whole_lines_only(tmp_path):
    file = LineFile(tmp_path / "out.jsonl")
    file.append([b"whole line\n"])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, before[1]))
    try:
        with pytest.raises(StorageError, match="writing"):
            file.append([b"another line\n"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert file.path.read_bytes() == b"whole line\n"
    assert file.num_lines == 1
    file.append([b"later\n"])
    file.close()
    assert file.path.read_bytes() == b"whole line\nlater\n"
