"""Lines are written exactly once and in input order, in whatever order they finish; waiting lines are on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgl_batch.file_run.line_file import LineFile
from sgl_batch.file_run.ordered_output import OrderedOutput
from sgl_batch.file_run.waiting_results import Finished, WaitingResults
from sgl_batch.jobs.scratch import StorageError

# No deadline: a busy machine is no fault of the code.
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def make(directory, file_bytes=1 << 20):
    return OrderedOutput(
        LineFile(directory / "out.jsonl"),
        LineFile(directory / "out.errors.jsonl"),
        WaitingResults(directory / "out.jsonl", file_bytes=file_bytes),
    )


def finished(index):
    return Finished(index=index, result_line=b"%d\n" % index, failed=index % 3 == 0)


def written(directory, name):
    path = directory / name
    return [int(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def all_written(directory):
    return written(directory, "out.jsonl"), written(directory, "out.errors.jsonl")


def expected(indices):
    return [i for i in sorted(indices) if i % 3], [i for i in sorted(indices) if i % 3 == 0]


@QUICK
@given(order=st.permutations(range(40)), file_bytes=st.sampled_from([1, 150, 1 << 20]))
def test_any_order_of_finishing_gives_the_order_of_the_input(tmp_path_factory, order, file_bytes):
    directory = tmp_path_factory.mktemp("ordered")
    output = make(directory, file_bytes)
    for position, index in enumerate(order):
        output.add(finished(index))
        while output.write_ready(7):
            pass
        added = set(order[: position + 1])
        ready = next(i for i in range(41) if i not in added)
        assert all_written(directory) == expected(range(ready))
    assert output.num_waiting == 0
    output.close()
    assert all_written(directory) == expected(range(40))


@QUICK
@given(
    indices=st.lists(st.integers(0, 60), unique=True),
    file_bytes=st.sampled_from([1, 150, 1 << 20]),
    limit=st.integers(1, 10),
)
def test_the_rest_is_written_over_gaps(tmp_path_factory, indices, file_bytes, limit):
    directory = tmp_path_factory.mktemp("gaps")
    output = make(directory, file_bytes)
    for index in indices:
        output.add(finished(index))
    while output.write_rest(limit):
        pass
    output.close()
    assert all_written(directory) == expected(indices)
    assert output.num_ok + output.num_failed == len(indices)


def waiting_files(directory):
    return sorted(path.name for path in directory.glob(".out.jsonl.kept-*"))


def test_waiting_lines_are_on_disk_at_once_and_removed_when_written(tmp_path):
    output = make(tmp_path, file_bytes=2_000)
    for index in range(1, 1000):
        output.add(finished(index))
        kept = b"".join((tmp_path / name).read_bytes() for name in waiting_files(tmp_path))
        assert b"\n%d " % index in b"\n" + kept
    assert output.num_waiting == 999
    assert len(waiting_files(tmp_path)) > 3
    assert not (tmp_path / "out.jsonl").exists()
    output.add(finished(0))
    while output.write_ready(100):
        pass
    output.sync()
    assert len(waiting_files(tmp_path)) == 1, "written files are removed while the run goes on"
    output.close()
    assert all_written(tmp_path) == expected(range(1000))
    assert waiting_files(tmp_path) == []


def test_a_file_of_waiting_lines_is_removed_only_after_the_output_is_on_the_disk(tmp_path, monkeypatch):
    steps = []
    sync, unlink = LineFile.sync, Path.unlink

    def recorded_sync(self):
        steps.append(("sync", self.path.name))
        sync(self)

    def recorded_unlink(self, **options):
        steps.append(("unlink", self.name))
        unlink(self, **options)

    monkeypatch.setattr(LineFile, "sync", recorded_sync)
    monkeypatch.setattr(Path, "unlink", recorded_unlink)
    output = make(tmp_path, file_bytes=1)
    for index in (2, 1, 0):
        output.add(finished(index))
    output.write_ready(10)
    output.sync()
    assert steps[:3] == [("sync", "out.jsonl"), ("sync", "out.errors.jsonl"), ("unlink", ".out.jsonl.kept-0")]
    output.close()


def test_a_disk_that_fails_under_the_output_leaves_what_waits(tmp_path, monkeypatch):
    output = make(tmp_path)
    output.add(finished(1))
    output.add(finished(2))
    monkeypatch.setattr(LineFile, "append", full_disk)
    output.add(finished(0))
    with pytest.raises(StorageError):
        output.write_ready(10)
    output.close()
    [name] = waiting_files(tmp_path)
    assert (tmp_path / name).read_bytes() == b"1 0 1\n2 0 2\n"


def full_disk(self, lines):
    raise StorageError("writing failed: No space left on device")
