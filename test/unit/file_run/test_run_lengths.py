"""Lengths of answers: in the order of lines, in bounded memory."""

from __future__ import annotations

from sgl_batch.file_run.run_lengths import RunLengths
from sgl_batch.planner.workload import Request


def test_lengths_come_in_the_order_of_lines_whenever_they_are_answered():
    lengths = RunLengths()
    for index in (2, 0, 1):
        lengths.add(index, prompt=10 + index, output=5)
    assert [one.prompt for one in lengths.workload().requests] == [10, 11, 12]


def test_choices_are_sequences_and_lines_without_tokens_are_none():
    lengths = RunLengths()
    assert lengths.workload() is None
    lengths.add(0, prompt=4, output=6, choices=3)
    lengths.add(1, prompt=0, output=0)
    assert lengths.workload().requests == [Request(4, 2)] * 3
    assert lengths.workload().count == 3


def test_of_many_lines_an_even_sample_stands_for_all():
    lengths = RunLengths(most_kept=8)
    for index in range(100):
        lengths.add(index, prompt=index + 1, output=1)
    found = lengths.workload()
    steps = {after.prompt - before.prompt for before, after in zip(found.requests, found.requests[1:], strict=False)}
    assert found.count == 100
    assert 4 <= len(found.requests) <= 8
    assert len(steps) == 1
