"""Steps in flight are processed once and in order, each sequence is in one, and a boundary drains its own group."""

from __future__ import annotations

import logging
import zlib
from collections import defaultdict, deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_scenarios import Scenario, tight
from virtual_ranks import Part, VirtualRanks

from sgl_batch.core.rank_moves import Migration
from sgl_batch.managers.steps_in_flight import (
    StepInFlight,
    StepsInFlight,
    check_overlap,
    is_wanted,
    with_copied_results,
)


class Steps:
    """Makes steps, and notes which of them are processed."""

    def __init__(self) -> None:
        self.in_flight, self.processed, self.done = StepsInFlight(), list[str](), set[str]()

    def submit(self, name: str, sequences: str, *, depth: int = 2) -> StepInFlight:
        step = StepInFlight(
            sequences=frozenset(sequences),
            process=lambda: self.processed.append(name),
            is_done=lambda: name in self.done,
        )
        return self.in_flight.submit(step, depth=depth)


@pytest.fixture
def steps() -> Steps:
    return Steps()


def test_at_depth_one_results_are_processed_when_the_step_is_submitted(steps: Steps) -> None:
    for name in "ab":
        steps.submit(name, "xy", depth=1)
    assert (steps.processed, len(steps.in_flight)) == (["a", "b"], 0)


def test_at_depth_two_the_results_of_one_step_wait(steps: Steps) -> None:
    first = steps.submit("a", "xy")
    assert first in steps.in_flight
    steps.submit("b", "z")
    assert steps.processed == ["a"]
    assert first not in steps.in_flight
    steps.submit("c", "xy")
    assert steps.processed == ["a", "b"]


def test_a_sequence_is_in_one_step_in_flight_at_most(steps: Steps) -> None:
    steps.submit("a", "xy")
    with pytest.raises(AssertionError, match="y is in two steps"):
        steps.submit("b", "yz")
    steps.in_flight.drain("y")
    steps.submit("b", "yz")
    assert len(steps.in_flight) == 1


def test_a_drain_processes_the_steps_of_its_sequences_and_leaves_the_others(steps: Steps) -> None:
    for name, sequences in (("a", "uv"), ("b", "wx"), ("c", "yz")):
        steps.submit(name, sequences, depth=4)
    steps.in_flight.drain("q")
    assert steps.processed == []
    steps.in_flight.drain("vz")
    assert steps.processed == ["a", "c"]
    steps.in_flight.drain()
    steps.in_flight.drain()
    assert steps.processed == ["a", "c", "b"]


def test_a_poll_processes_the_steps_that_are_done_in_order(steps: Steps) -> None:
    made = [steps.submit(name, sequences, depth=4) for name, sequences in (("a", "u"), ("b", "v"), ("c", "w"))]
    steps.done = {"b", "c"}
    assert steps.in_flight.poll() == []
    steps.done = {"a", "b"}
    assert steps.in_flight.poll() == made[:2]
    assert (steps.processed, len(steps.in_flight)) == (["a", "b"], 1)


def test_results_that_cannot_be_processed_are_not_processed_again() -> None:
    in_flight, calls = StepsInFlight(), list[int]()

    def fail() -> None:
        calls.append(1)
        raise ValueError("no such row")

    in_flight.submit(StepInFlight(sequences=frozenset("x"), process=fail, is_done=lambda: True), depth=2)
    with pytest.raises(ValueError, match="no such row"):
        in_flight.drain()
    in_flight.drain()
    assert len(calls) == 1


def test_results_of_a_batch_are_copied_at_once_and_processed_for_its_rows_of_then() -> None:
    batch = SimpleNamespace(
        device="cpu",
        return_logprob=True,
        return_hidden_states=False,
        copy=lambda: SimpleNamespace(reqs=[SimpleNamespace(rid="r1")]),
    )
    copied, processed = list[dict[str, bool]](), list[Any]()
    result: Any = SimpleNamespace(
        logits_output=SimpleNamespace(next_token_logits=torch.zeros(2, 5)), copy_to_cpu=lambda **how: copied.append(how)
    )
    step = with_copied_results(batch, result, lambda *results: processed.append(results))
    assert copied == [{"return_logprob": True, "return_hidden_states": False}]
    assert result.logits_output.next_token_logits is None, "as large as the vocabulary"
    assert step.sequences == {"r1"}
    assert step.is_done(), "on a CPU a pass has ended when its call returns"
    step.process()
    assert [(kept.reqs[0].rid, of) for kept, of in processed] == [("r1", result)]


@pytest.mark.parametrize("settled", ["on", "off"])
def test_the_option_decides_on_overlap_and_the_start_where_it_is_auto(settled: str) -> None:
    assert [is_wanted(option, settled) for option in ("on", "off", "auto")] == [True, False, settled == "on"]


@pytest.mark.parametrize(("overlap", "several_ranks", "warns"), [("on", True, 1), ("auto", True, 0), ("on", False, 0)])
def test_several_ranks_warn_only_where_overlap_is_asked_for(caplog, overlap, several_ranks, warns) -> None:
    with caplog.at_level(logging.WARNING):
        check_overlap(overlap, several_ranks=several_ranks)
    assert len(caplog.records) == warns


class LateDevice:
    """One stream of steps. Each ends `lag` launches after its own, or when the host waits for it.

    Each token depends on the one before, which is here. `stalls` counts waits while no other step was launched.
    """

    def __init__(self, lag: int) -> None:
        self.lag, self.stalls = lag, 0
        self.tokens: defaultdict[str, list[int]] = defaultdict(list)
        self._stream: deque[tuple[frozenset[str], int]] = deque()
        self._launched = self._ended = 0

    def launch(self, sequences: frozenset[str]) -> int:
        """Launch a step; return its number."""
        self._launched += 1
        self._stream.append((sequences, self._launched))
        while self._stream[0][1] <= self._launched - self.lag:
            self._end_oldest()
        return self._launched

    def is_done(self, number: int) -> bool:
        return number <= self._ended

    def wait(self, number: int) -> None:
        self.stalls += number == self._launched and not self.is_done(number)
        while not self.is_done(number):
            self._end_oldest()

    def _end_oldest(self) -> None:
        sequences, self._ended = self._stream.popleft()
        for name in sequences:
            before = self.tokens[name]
            before.append(zlib.crc32(f"{name} {before[-1:]}".encode()))


class Groups:
    """Disjoint groups of sequences, each with its queue and boundaries, that take turns on one device."""

    def __init__(self, seeds: tuple[int, ...], *, depth: int, polls: bool = False) -> None:
        self.device, self.in_flight, self.depth, self.polls = LateDevice(lag=3), StepsInFlight(), depth, polls
        self.tokens_seen: defaultdict[str, list[int]] = defaultdict(list)
        self.left_in_flight = 0
        self.groups = [self._made(tight(seed)) for seed in seeds]

    @staticmethod
    def _made(of: Scenario) -> VirtualRanks:
        requests = [replace(request, rank=0) for request in of.requests]
        room = {"pages": of.pages, "request_slots": of.request_slots}
        return VirtualRanks(requests, of.plan, num_ranks=1, migration=Migration.NEVER, **room)

    def run(self) -> Groups:
        while not all(group.is_done for group in self.groups):
            for number, group in enumerate(self.groups):
                if not group.is_done:
                    self._step(number, group)
        assert not self.in_flight
        return self

    def _step(self, number: int, group: VirtualRanks) -> None:
        """Run the next step of a group, which depends on the group's own results only."""
        if self.polls:
            self.in_flight.poll()
        before = len(self.in_flight)
        drained = self.in_flight.drain({f"{number} {name}" for name in group.alive})
        assert all(name.startswith(f"{number} ") for step in drained for name in step.sequences)
        assert len(self.in_flight) == before - len(drained), "the others' steps are in flight as before"
        self.left_in_flight += len(self.in_flight)
        if group.is_done:
            return
        parts = group.launch()
        if parts[0].batch is None:
            group.finish(parts)
            return
        sequences = frozenset(f"{number} {one.sequence_id}" for one in parts[0].batch.sequences)
        launched = self.device.launch(sequences)
        step = StepInFlight(
            sequences=sequences,
            process=lambda: self._process(group, parts, sequences, launched),
            is_done=lambda: self.device.is_done(launched),
        )
        self.in_flight.submit(step, depth=self.depth)

    def _process(self, group: VirtualRanks, parts: list[Part], sequences: frozenset[str], launched: int) -> None:
        self.device.wait(launched)
        for name in sequences:
            self.tokens_seen[name].append(self.device.tokens[name][-1])
        group.finish(parts)


@pytest.mark.parametrize("polls", [False, True])
@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("seeds", [(1, 2), (3, 4), (5, 6, 7), (8, 9)])
def test_groups_that_take_turns_on_a_late_device_act_as_with_one_step_at_a_time(
    seeds: tuple[int, ...], depth: int, polls: bool
) -> None:
    """Tokens and ends are the same, and a boundary of one group leaves the steps of the others in flight."""
    apart, ahead = Groups(seeds, depth=1).run(), Groups(seeds, depth=depth, polls=polls).run()
    assert ahead.tokens_seen == apart.tokens_seen
    assert [group.log for group in ahead.groups] == [group.log for group in apart.groups]
    assert sum(group.log.boundaries for group in ahead.groups) > 0
    assert apart.left_in_flight == 0 < ahead.left_in_flight
    assert ahead.device.stalls < apart.device.stalls, "the device has the next step while the host waits for one"
