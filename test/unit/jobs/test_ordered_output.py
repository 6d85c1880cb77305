"""Exactly once and in input order, whatever the order of finishing, from memory or from the spool."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgl_batch.jobs.line_file import LineFile
from sgl_batch.jobs.ordered_output import OrderedOutput
from sgl_batch.jobs.spool import Finished, Spool

# No deadline: a busy machine is no fault of the code.
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def make(directory, memory_bytes=1 << 20):
    return OrderedOutput(
        LineFile(directory / "out.jsonl"),
        LineFile(directory / "out.errors.jsonl"),
        Spool(directory / "spool.db"),
        memory_bytes=memory_bytes,
    )


def finished(index):
    return Finished(index=index, record=b"%d\n" % index, failed=index % 3 == 0)


def written(directory, name):
    path = directory / name
    return [int(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def all_written(directory):
    return written(directory, "out.jsonl"), written(directory, "out.errors.jsonl")


def expected(indices):
    return [i for i in sorted(indices) if i % 3], [i for i in sorted(indices) if i % 3 == 0]


@QUICK
@given(order=st.permutations(range(40)), memory_bytes=st.sampled_from([0, 1500, 1 << 20]))
def test_any_order_of_finishing_gives_the_order_of_the_input(tmp_path_factory, order, memory_bytes):
    directory = tmp_path_factory.mktemp("ordered")
    output = make(directory, memory_bytes)
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
    memory_bytes=st.sampled_from([0, 1500, 1 << 20]),
    limit=st.integers(1, 10),
)
def test_the_rest_is_written_over_gaps(tmp_path_factory, indices, memory_bytes, limit):
    directory = tmp_path_factory.mktemp("gaps")
    output = make(directory, memory_bytes)
    for index in indices:
        output.add(finished(index))
    while output.write_rest(limit):
        pass
    output.close()
    assert all_written(directory) == expected(indices)
    assert output.num_ok + output.num_failed == len(indices)


def test_what_exceeds_the_memory_waits_in_the_spool(tmp_path):
    output = make(tmp_path, memory_bytes=10_000)
    for index in range(1, 1000):
        output.add(finished(index))
    assert (tmp_path / "spool.db").exists()
    assert output.num_waiting == 999
    assert not (tmp_path / "out.jsonl").exists()
    output.add(finished(0))
    while output.write_ready(100):
        pass
    output.close()
    assert all_written(tmp_path) == expected(range(1000))
    assert not (tmp_path / "spool.db").exists()
