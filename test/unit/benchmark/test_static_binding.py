"""The batches that stock SGLang is compared by, and the fit of a pass's costs."""

from __future__ import annotations

from dataclasses import astuple, replace
from pathlib import Path

import pytest
from stock_binding.engine_log import Counts, counts_of
from stock_binding.engines import Limits, dealt
from stock_binding.simulated import COUNTED, LineCosts, counts_in, fit, simulate
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


def test_passes_and_retractions_are_counted_in_sglangs_messages():
    messages = "\n".join(
        [
            "[16:44:31] Prefill batch, #new-seq: 5, #new-token: 320, #cached-token: 0, token usage: 0.13, ...",
            "[16:44:32] Decode batch, #running-req: 5, #token: 455, token usage: 0.19, cpu graph: False, ...",
            "[16:44:33] KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_tokens_gained: 193, "
            "#new_token_ratio: 0.0980 -> 0.5456",
            "[16:44:34] Decode batch, #running-req: 3, #token: 465, token usage: 0.19, cpu graph: False, ...",
            "[16:44:35] Prefill batch, #new-seq: 2, #new-token: 132, #cached-token: 9, token usage: 0.2, ...",
        ]
    )
    found = counts_of(messages, prompt_tokens=320)
    # Two of the 132 tokens are the last ones that the two sequences had sampled.
    assert found == Counts(prefill_passes=2, decode_steps=2, decoded_rows=8, retracted=2, again=130)


# What stock SGLang 0.5.16 counted of the batches with scarce memory: prefill passes, decode steps, decoded rows,
# retractions, and tokens computed again (docs/benchmarks.md, 2026-11-23).
STOCK = {
    "uniform outputs, scarce memory": (42, 438, 3008, 0, 0),
    "long outputs, scarce memory": (25, 2626, 8107, 3, 695),
    "long tail of outputs, scarce memory": (18, 2412, 5810, 4, 689),
    "prompts and outputs that differ, scarce memory": (24, 2613, 6113, 1, 163),
}


def test_scarce_memory_takes_the_passes_and_retractions_that_stock_sglang_took():
    scarce = replace(LIMITS, max_total_tokens=900)
    named = {one.name: one.lengths for one in batches(None) if one.scarce}
    assert named.keys() == STOCK.keys()
    for name, lengths in named.items():
        *done, again = astuple(counts_in(*simulate(lengths, scarce, LineCosts(KNOWN))))
        *stock_done, stock_again = STOCK[name]
        assert done == stock_done, name
        # Stock SGLang's prefix cache still had one prompt of 16 tokens.
        assert 0 <= again - stock_again <= 16, name
