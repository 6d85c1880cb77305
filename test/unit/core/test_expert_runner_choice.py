"""Which expert runner computes a call: each rule by which measurements decide, by the number of tokens."""

from __future__ import annotations

import math

import pytest

from sgl_batch.core.decode_choice import Failed
from sgl_batch.core.expert_runner_choice import TOLERANCES, RunnerMeasured, RunnerTable, choose_runners

NAMES, TOKENS = ("sglang", "triton", "deepgemm"), (16, 256, 4096)
TABLE = RunnerTable(best=((0, "sglang"), (512, "triton"), (4096, "deepgemm")))


@pytest.mark.parametrize(
    ("tokens", "runner"),
    [(0, "sglang"), (16, "sglang"), (511, "sglang"), (512, "triton"), (4095, "triton"), (100_000, "deepgemm")],
)
def test_a_call_gets_the_runner_of_the_largest_number_of_tokens_up_to_its_own(tokens, runner):
    assert TABLE.runner_for(tokens) == runner


def test_a_table_is_read_back_from_its_text():
    assert str(TABLE) == "sglang, triton from 512 tokens, deepgemm from 4096 tokens"
    assert RunnerTable.parse(str(TABLE)) == TABLE
    assert RunnerTable.parse("triton").best == ((0, "triton"),)
    with pytest.raises(ValueError, match="invalid literal"):
        RunnerTable.parse("triton from here")


def measured(*ms, errors=(0.0, 0.0, 0.0)):
    return RunnerMeasured(seconds=tuple(one / 1e3 for one in ms), errors=errors)


def chosen(**outcomes):
    return choose_runners(NAMES, TOKENS, outcomes, dtype="bfloat16")


def test_another_runner_must_win_by_five_per_cent_for_a_number_of_tokens():
    choice = chosen(sglang=measured(1, 2, 10), triton=measured(0.98, 1.9, 9), deepgemm=measured(3, 3, 5))
    assert choice.mode == "sglang, triton from 64 tokens, deepgemm from 1024 tokens"
    assert choice.numbers == {
        "tokens": TOKENS,
        "sglang": (0.001, 0.002, 0.01),
        "triton": (0.00098, 0.0019, 0.009),
        "deepgemm": (0.003, 0.003, 0.005),
    }
    assert choice.why.startswith(f"{choice.mode}: calls of 16, 256, 4096 tokens take sglang 1.000, 2.000, 10.000 ms; ")


def test_a_winner_on_the_device_may_not_lose_as_the_host_sees_it():
    def of(device_s, host_s):
        return RunnerMeasured(seconds=(device_s,) * 3, host_seconds=(host_s,) * 3, errors=(0.0,) * 3)

    assert chosen(sglang=of(1.0, 2.0), triton=of(0.5, 2.1)).mode == "triton"
    choice = chosen(sglang=of(1.0, 2.0), triton=of(0.5, 2.2))
    assert choice.mode == "sglang"
    assert choice.numbers["triton, as the host sees it"] == (2.2,) * 3
    assert chosen(sglang=of(1.0, 2.0), triton=of(0.96, 0.1)).mode == "sglang", "graphs have no host's part"


def test_a_runner_with_other_outputs_is_left_out_at_all_numbers_of_tokens():
    limit = TOLERANCES["bfloat16"]
    near = measured(0.5, 1, 5, errors=(limit, 0.0, limit))
    assert chosen(sglang=measured(1, 2, 10), triton=near).mode == "triton"
    for far in (1.1 * limit, math.nan, math.inf):
        choice = chosen(sglang=measured(1, 2, 10), triton=measured(0.5, 1, 5, errors=(0.0, 0.0, far)))
        assert choice.mode == "sglang"
        assert f"triton differs from sglang by {far:.1e}, more than 2e-02" in choice.why
    assert set(TOLERANCES) == {"bfloat16", "float16", "float32"}


def test_a_runner_that_fails_or_has_no_time_is_left_out():
    choice = chosen(sglang=measured(1, 2, 10), triton=Failed(why="RuntimeError: no kernel"))
    assert choice.mode == "sglang"
    assert choice.why.endswith("; triton failed: RuntimeError: no kernel; deepgemm was not measured: the time was up")


def test_without_the_first_runners_outputs_there_is_nothing_to_compare_with():
    failed = chosen(sglang=Failed(why="a"), triton=measured(1, 2, 10))
    assert (failed.mode, failed.numbers) == ("sglang", {})
    assert failed.why == "sglang: it failed: a, and others are compared with it alone"
    assert chosen().why == "sglang: it was not measured: the time was up, and others are compared with it alone"
