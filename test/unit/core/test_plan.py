"""The limits of a plan, and groups cut by them: every row exactly once, without padding."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_batch.config import BatchConfig, ForwardConfig, ScheduleConfig
from sgl_batch.core.plan import PhasePlan, Piece, cut_sequences, make_plan, num_expert_calls, row_spans
from sgl_batch.core.units import FUSED, SPLIT

# No deadline: a busy machine is no fault of the code.
QUICK = settings(max_examples=200, deadline=None)

forward_configs = st.builds(
    lambda attn_p, moe_p, attn_d, moe_d: ForwardConfig(
        b_attn_prefill=min(attn_p, moe_p),
        b_moe_prefill=moe_p,
        b_attn_decode=min(attn_d, moe_d),
        b_moe_decode=moe_d,
    ),
    *[st.integers(1, 5000)] * 4,
)
schedule_configs = st.builds(
    ScheduleConfig,
    boundary_tokens=st.integers(1, 200),
    refill_watermark=st.floats(0, 1),
    ready_ahead=st.floats(0, 16),
)


@QUICK
@given(forward_configs, schedule_configs, st.integers(1, 5000))
def test_no_limit_of_a_plan_exceeds_what_the_engine_holds(forward, schedule, max_running):
    plan = make_plan(BatchConfig(forward=forward, schedule=schedule), page_size=64, max_running=max_running)
    assert 1 <= plan.decode.b_attn <= plan.decode.b_moe <= max_running
    assert plan.decode.b_moe <= plan.ready_target <= max_running
    assert 1 <= plan.prefill.b_attn <= plan.prefill.b_moe == forward.b_moe_prefill


@pytest.mark.parametrize(("asked", "whole", "b_attn"), [(0, True, 700), (0, False, 256), (3, True, 3), (3, False, 3)])
def test_a_decode_group_is_one_sub_batch_by_default_where_nothing_is_gained_by_cutting_it(asked, whole, b_attn):
    config = BatchConfig(forward=ForwardConfig(b_attn_decode=asked, b_moe_decode=700))
    assert make_plan(config, page_size=16, max_running=1000, whole_groups=whole).decode.b_attn == b_attn
    assert make_plan(config, page_size=16, max_running=2, whole_groups=whole).decode.b_attn == 2


def test_a_plan_keeps_what_fits():
    config = BatchConfig(
        forward=ForwardConfig(b_attn_prefill=3, b_moe_prefill=7, b_attn_decode=2, b_moe_decode=10),
        schedule=ScheduleConfig(
            boundary_tokens=5, refill_watermark=0.25, ready_ahead=0.31, share_prefixes=False, mix_prefill=6
        ),
    )
    plan = make_plan(config, page_size=16, max_running=100)
    assert json.loads(json.dumps(plan.as_dict())) == {
        "prefill": {"b_attn": 3, "b_moe": 7, "yield_option": "split"},
        "decode": {"b_attn": 2, "b_moe": 10, "yield_option": "split"},
        "page_size": 16,
        "boundary_tokens": 5,
        "refill_watermark": 0.25,
        "ready_target": 14,
        "share_prefixes": False,
        "mix_prefill": 6,
        "partition_below": 0,
        "partition_least_tokens": 512,
        "partition_prompt_tokens": 0,
    }
    assert plan.mixed == PhasePlan(b_attn=2, b_moe=16)


def test_without_accumulation_sequences_yield_after_their_experts_in_calls_of_a_sub_batch():
    config = BatchConfig(forward=ForwardConfig(b_attn_decode=2, b_moe_decode=10, accumulate=False))
    plan = make_plan(config, page_size=16, max_running=100)
    assert plan.decode == PhasePlan(b_attn=2, b_moe=10, yield_option="fused")
    assert [num_expert_calls(rows, plan.decode) for rows in (0, 2, 3, 10)] == [1, 1, 2, 5]
    accumulating = PhasePlan(b_attn=2, b_moe=10)
    assert [num_expert_calls(rows, accumulating) for rows in (0, 3, 10, 11)] == [1, 1, 1, 2]


@pytest.mark.parametrize(
    ("accumulate", "prefill", "decode"), [(None, FUSED, SPLIT), (True, SPLIT, SPLIT), (False, FUSED, FUSED)]
)
def test_prompts_of_a_dense_model_yield_after_its_mlp_by_default(accumulate, prefill, decode):
    config = BatchConfig(forward=ForwardConfig(accumulate=accumulate))
    plan = make_plan(config, page_size=16, max_running=100, dense=True)
    assert (plan.prefill.yield_option, plan.decode.yield_option) == (prefill, decode)
    other = make_plan(config, page_size=16, max_running=100).prefill.yield_option
    assert other == (FUSED if accumulate is False else SPLIT)


def test_a_default_sub_batch_shrinks_to_a_smaller_group():
    config = BatchConfig(forward=ForwardConfig(b_moe_prefill=100, b_moe_decode=8))
    plan = make_plan(config, page_size=64, max_running=1000)
    assert (plan.prefill.b_attn, plan.decode.b_attn) == (100, 8)


@QUICK
@given(st.integers(0, 2000), st.integers(1, 2100))
def test_spans_cover_every_row_once_in_the_fewest_pieces(num_rows, limit):
    spans = row_spans(num_rows, limit)
    assert [row for start, end in spans for row in range(start, end)] == list(range(num_rows))
    assert len(spans) == math.ceil(num_rows / limit)
    assert all(0 < end - start <= limit for start, end in spans)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_holds_no_row_is_refused(limit):
    with pytest.raises(AssertionError, match="must be positive"):
        row_spans(3, limit)


@QUICK
@given(st.lists(st.integers(0, 60), min_size=1, max_size=12), st.integers(1, 80))
def test_pieces_of_all_spans_cover_each_sequence_once_and_in_order(lengths, limit):
    covered: list[list[int]] = [[] for _ in lengths]
    for span in row_spans(sum(lengths), limit):
        pieces = cut_sequences(lengths, span)
        assert sum(piece.end - piece.start for piece in pieces) == span[1] - span[0]
        assert all(piece.start < piece.end for piece in pieces), "a piece has at least one row"
        for piece in pieces:
            covered[piece.index] += range(piece.start, piece.end)
    assert covered == [list(range(length)) for length in lengths]


@QUICK
@given(st.lists(st.integers(0, 60), min_size=1, max_size=12), st.integers(1, 80))
def test_the_rows_of_a_span_are_the_pieces_laid_end_to_end(lengths, limit):
    rows = [(index, row) for index, length in enumerate(lengths) for row in range(length)]
    for start, end in row_spans(len(rows), limit):
        pieces = cut_sequences(lengths, (start, end))
        assert [(p.index, row) for p in pieces for row in range(p.start, p.end)] == rows[start:end]


def test_a_sequence_over_the_edge_of_a_span_is_chunked_there():
    assert cut_sequences([3, 5, 2], (2, 6)) == [Piece(index=0, start=2, end=3), Piece(index=1, start=0, end=3)]
    assert cut_sequences([3, 5, 2], (6, 10)) == [Piece(index=1, start=3, end=5), Piece(index=2, start=0, end=2)]
