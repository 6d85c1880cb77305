"""The batches that stock SGLang is compared by, and the fit of a pass's costs."""

from __future__ import annotations

from pathlib import Path

import pytest
from stock_binding.engines import Limits, dealt
from stock_binding.simulated import COUNTED, LineCosts, fit, simulate
from stock_binding.workloads import CALIBRATION, batches

LIMITS = Limits(
    model=Path("m"), vocabulary=10, max_running_requests=16, max_total_tokens=1 << 15, chunked_prefill_size=512
)
KNOWN = dict(zip(COUNTED, (5e-3, 1e-3, 1e-6, 3e-3, 1e-4, 1e-8), strict=True))


def _outputs(lengths) -> int:
    return sum(output for _, output in lengths)


def test_costs_of_a_pass_are_found_again_from_batches_of_equal_lengths():
    costs = LineCosts(KNOWN)
    runs = CALIBRATION
    seconds = [run.times * simulate(run.lengths, LIMITS, costs)[0].seconds for run in runs]
    found, errors = fit(runs, seconds, LIMITS)
    assert found.seconds == pytest.approx(KNOWN, rel=1e-6)
    assert errors == pytest.approx([0.0] * len(runs), abs=1e-9)


def test_a_cost_that_would_be_below_zero_is_left_out():
    costs = LineCosts({**KNOWN, "prefill pass": 0.0})
    seconds = [run.times * simulate(run.lengths, LIMITS, costs)[0].seconds for run in CALIBRATION]
    # The first run, with the most passes for its tokens, is measured too short.
    found, _ = fit(CALIBRATION, [0.9 * seconds[0], *seconds[1:]], LIMITS)
    assert min(found.seconds.values()) == 0.0
    assert all(value >= 0 for value in found.seconds.values())


def test_batches_of_one_engine_have_the_same_tokens_and_unequal_ones_take_longer():
    equal, uniform, tail, *_ = batches(None)
    costs = LineCosts(KNOWN)
    assert _outputs(equal.lengths) == _outputs(uniform.lengths) == _outputs(tail.lengths)
    seconds = [simulate(one.lengths, LIMITS, costs)[0].seconds for one in (equal, uniform, tail)]
    assert seconds == sorted(seconds)


def test_uneven_shares_have_the_outputs_of_the_even_ones():
    even, uneven = batches(None)[-2:]
    assert sorted(even.lengths) == sorted(uneven.lengths)
    first, second = map(_outputs, dealt(even.lengths, 2))
    assert abs(first - second) < 0.01 * first
    first, second = map(_outputs, dealt(uneven.lengths, 2))
    assert first > 2 * second
