"""Prefill-decode disaggregation: every sequence goes through both phases, and KV takes time between them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_costs import LinearCosts, plan, requests, total

from sgl_batch.simulator.rivals.disaggregation import Unit, disaggregated, prefill_unit

UNIT = Unit(ranks=2, pages=60, request_slots=64)


def counts(runs, count: str) -> int:
    return sum(total(run.ranks, count) for run in runs)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 100), st.integers(1, 60)), min_size=1, max_size=30),
    prefill=st.integers(1, 3),
    decode=st.integers(1, 3),
)
def test_every_sequence_is_finished_by_some_unit(lengths, prefill, decode):
    prompts, outputs = zip(*lengths, strict=True)
    made = requests(prompts, outputs)
    first, second = disaggregated(made, UNIT, plan(), LinearCosts(), prefill=prefill, decode=decode, alike=False)
    short = sum(output == 1 for output in outputs)
    assert counts(first, "prompt_tokens") == sum(prompts)
    assert counts(second, "finished") == len(lengths) - short
    assert counts(first, "output_tokens") + counts(second, "output_tokens") == sum(outputs)
    for run in (*first, *second):
        assert all(rank.is_empty and not rank.form.device.reserved_pages for rank in run.ranks)


def test_prompts_leave_a_rank_one_behind_the_other():
    made = requests([32, 32, 32], [5, 5, 5])
    unit = Unit(ranks=1, pages=60, request_slots=64)
    instance, handed = prefill_unit(made, range(3), unit, plan(96), LinearCosts())
    moved = 32e-5
    assert [one.number for one in handed] == [0, 1, 2]
    assert [one.at - instance.now for one in handed] == pytest.approx([moved, 2 * moved, 3 * moved])


def test_one_unit_stands_for_all_that_are_alike():
    made = requests([40] * 24, [30] * 24)
    ends = []
    for alike in (False, True):
        first, second = disaggregated(made, UNIT, plan(), LinearCosts(), prefill=2, decode=3, alike=alike)
        assert sum(run.stands_for for run in first) == 2
        assert sum(run.stands_for for run in second) == 3
        ends.append(max(run.account.seconds for run in second))
    assert ends[1] == pytest.approx(ends[0], rel=0.05)


def test_a_decode_unit_waits_for_prompts_without_work():
    made = requests([90] * 4, [2] * 4)
    _, second = disaggregated(made, UNIT, plan(16), LinearCosts(), prefill=1, decode=1, alike=False)
    account = second[0].account
    assert account.parts["arrivals"] > 0.5 * account.seconds
    assert account.idle >= account.parts["arrivals"]
