"""Results that wait: copied at once, processed once, in order, and before anybody else looks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_batch.managers.step_overlap import StepOverlap, is_wanted
from sgl_batch.model_executor.counters import Counters


class Step:
    """A decode batch that goes on, and its result."""

    def __init__(self, number: int) -> None:
        self.number, self.copied = number, False
        self.batch = SimpleNamespace(
            device="cpu", return_logprob=True, return_hidden_states=False, copy=lambda: f"rows of step {number}"
        )
        logits = SimpleNamespace(next_token_logits=torch.zeros(2, 5))
        self.result: Any = SimpleNamespace(logits_output=logits, copy_to_cpu=self._copy)

    def _copy(self, *, return_logprob: bool, return_hidden_states: bool) -> None:
        assert (return_logprob, return_hidden_states) == (True, False)
        assert self.result.copy_done is not None, "whoever copies records the end"
        self.copied = True


@pytest.fixture
def processed() -> list[Any]:
    return []


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def overlap(processed: list[Any], counters: Counters) -> StepOverlap:
    return StepOverlap(lambda *results: processed.append(results), counters)


def test_results_are_copied_when_they_are_held_and_processed_as_they_were_then(
    overlap: StepOverlap, processed: list[Any], counters: Counters
) -> None:
    first, second = Step(1), Step(2)
    overlap.hold(first.batch, first.result)
    assert first.copied
    assert first.result.logits_output.next_token_logits is None, "as large as the vocabulary"
    assert (overlap.under_way, processed) == (True, [])
    overlap.complete_while_computing()
    assert processed == [("rows of step 1", first.result)]
    overlap.hold(second.batch, second.result)
    overlap.complete()
    assert processed[1:] == [("rows of step 2", second.result)]
    assert not overlap.under_way
    assert counters.counts["decode_steps_overlapped"] == 1, "the second waited for nothing"


def test_there_may_be_nothing_to_process(overlap: StepOverlap, processed: list[Any], counters: Counters) -> None:
    overlap.complete()
    overlap.complete_while_computing()
    assert processed == []
    assert counters.counts["decode_steps_overlapped"] == 0


def test_only_one_step_is_ahead(overlap: StepOverlap) -> None:
    first, second = Step(1), Step(2)
    overlap.hold(first.batch, first.result)
    with pytest.raises(AssertionError, match="processed first"):
        overlap.hold(second.batch, second.result)


def test_results_that_cannot_be_processed_are_not_processed_again(counters: Counters) -> None:
    calls = []

    def fail(*results: Any) -> None:
        calls.append(results)
        raise ValueError("no such row")

    overlap = StepOverlap(fail, counters)
    overlap.hold(Step(1).batch, Step(1).result)
    with pytest.raises(ValueError, match="no such row"):
        overlap.complete()
    overlap.complete()
    assert len(calls) == 1


@pytest.mark.parametrize(("option", "wanted"), [("on", True), ("off", False), ("auto", False)])
def test_the_option_says_whether_results_wait(option: str, wanted: bool) -> None:
    assert is_wanted(option) is wanted
