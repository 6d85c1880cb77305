"""Overlap of copies and kernels in a trace: times count once, and only copies of host memory are counted."""

from __future__ import annotations

import gzip
import json

import pytest
from gpu_comparison.trace_overlap import common, overlap_of, read_trace, union


def event(category: str, begin: float, length: float, name: str = "work") -> dict[str, object]:
    return {"ph": "X", "cat": category, "ts": begin, "dur": length, "name": name}


TRACE = [
    event("kernel", 0, 1000),
    event("kernel", 500, 1000),  # on another stream, at once
    event("kernel", 3000, 1000),
    event("gpu_memcpy", 1000, 1500, "Memcpy HtoD (Pinned -> Device)"),
    event("gpu_memcpy", 2400, 200, "Memcpy DtoH (Device -> Pinned)"),
    event("gpu_memcpy", 3000, 900, "Memcpy DtoD (Device -> Device)"),
    event("cpu_op", 0, 9000),
    {"ph": "i", "cat": "kernel", "ts": 1},
]


def test_overlapping_times_count_once_and_the_share_of_copies_under_kernels_is_reported():
    found = overlap_of(TRACE)
    assert found is not None
    assert (found.stretch_s, found.computed_s, found.copied_s) == pytest.approx((4e-3, 2.5e-3, 1.6e-3))
    assert found.both_s == pytest.approx(0.5e-3)
    assert found.text().endswith("for 1.6 ms, 31% of it meanwhile")


def test_a_trace_of_a_cpu_has_no_overlap():
    assert overlap_of([event("cpu_op", 0, 10)]) is None


def test_a_gpu_that_copied_nothing_has_no_share():
    found = overlap_of([event("kernel", 0, 10)])
    assert found is not None
    assert "copied nothing" in found.text()


@pytest.mark.parametrize("packed", [True, False])
def test_a_trace_is_read_as_the_profiler_writes_it(tmp_path, packed):
    data = json.dumps({"traceEvents": TRACE}).encode()
    path = tmp_path / ("a.trace.json.gz" if packed else "a.trace.json")
    path.write_bytes(gzip.compress(data) if packed else data)
    assert read_trace(path) == TRACE


def test_unions_and_intersections_of_intervals():
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert common([(0, 4), (5, 6)], [(1, 2), (3, 5.5)]) == [(1, 2), (3, 4), (5, 5.5)]
