"""Plans of a group's sub-batches in one place: each view says what the sub-batch's own says, and padding is harmless.

What Triton attention makes of them is in test/integration/test_graphed_decode.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from sgl_batch.sglang_adapter.fixed_plans import FixedPlans

ROWS, SLOTS = 10, 60
CPU = torch.device("cpu")


@dataclass(kw_only=True)
class Plan:
    """What decode reads of SGLang's ForwardMetadata."""

    attn_logits: torch.Tensor
    attn_lse: torch.Tensor
    num_kv_splits: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor


def plan_of(sequences: list[list[int]]) -> tuple[Plan, int]:
    """A plan for sequences with these slots, whose indices have room to spare, and the number of slots."""
    lengths = torch.tensor([len(slots) for slots in sequences], dtype=torch.int32)
    slots = [slot for one in sequences for slot in one]
    plan = Plan(
        attn_logits=torch.zeros(len(sequences), 2, 4, 8),
        attn_lse=torch.zeros(len(sequences), 2, 4),
        num_kv_splits=lengths + 40,
        kv_indptr=torch.cat((torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32))),
        kv_indices=torch.tensor([*slots, 999, 999]),
    )
    return plan, len(slots)


def read(plan: Plan) -> list[list[int]]:
    """The slots of each sequence of a plan."""
    bounds = plan.kv_indptr.tolist()
    return [plan.kv_indices[a:b].tolist() for a, b in pairwise(bounds)]


FIRST, SECOND = [[3, 4, 5], [9], [20, 21]], [[30, 31, 32, 33], [7, 8]]


def test_views_say_what_the_sub_batches_plans_say() -> None:
    plans = FixedPlans(ROWS, SLOTS, CPU)
    assert plans.load([plan_of(FIRST), plan_of(SECOND)], 5)
    assert read(plans.plan(0, 3)) == FIRST
    assert read(plans.plan(3, 2)) == SECOND
    assert plans.plan(0, 3).num_kv_splits.tolist() == [43, 41, 42]
    assert plans.plan(3, 2).num_kv_splits.tolist() == [44, 42]


def test_padded_rows_attend_to_slot_0_alone() -> None:
    plans = FixedPlans(ROWS, SLOTS, CPU)
    plans.load([plan_of([[50] * 5] * 6)], 6)
    plans.load([plan_of(FIRST), plan_of(SECOND)], 8)
    assert read(plans.plan(3, 5)) == [*SECOND, [0], [0], [0]]
    assert plans.plan(3, 5).num_kv_splits.tolist() == [44, 42, 1, 1, 1]


def test_a_view_of_one_pass_is_that_of_the_next() -> None:
    plans = FixedPlans(ROWS, SLOTS, CPU)
    plans.load([plan_of(FIRST), plan_of(SECOND)], 8)
    view = plans.plan(3, 5)
    plans.load([plan_of(SECOND + SECOND[:1]), plan_of(FIRST)], 8)
    assert read(view) == [*FIRST, [0], [0]]
    assert view.num_kv_splits.tolist() == [43, 41, 42, 1, 1]


def test_scratch_memory_is_the_callers_own_for_the_padded_rows() -> None:
    plans = FixedPlans(ROWS, SLOTS, CPU)
    plans.load([plan_of(FIRST)], 4)
    one, other = plans.plan(0, 4), plans.plan(0, 4)
    assert (one.attn_logits.shape, one.attn_lse.shape) == ((4, 2, 4, 8), (4, 2, 4))
    assert one.attn_logits.data_ptr() != other.attn_logits.data_ptr()


@pytest.mark.parametrize("padded", [6, ROWS])
def test_as_many_slots_as_the_pool_has_fit_with_all_padding(padded: int) -> None:
    plans = FixedPlans(ROWS, SLOTS, CPU)
    sequences = [list(range(10 * i, 10 * i + 10)) for i in range(6)]
    assert plans.load([plan_of(sequences)], padded)
    assert read(plans.plan(0, padded)) == [*sequences, *[[0]] * (padded - 6)]


def test_its_bytes_are_those_of_bounds_splits_and_slots_with_room_for_padding() -> None:
    assert FixedPlans(ROWS, SLOTS, CPU).num_bytes == 4 * (ROWS + 1) + 4 * ROWS + 4 * ROWS + 8 * (SLOTS + ROWS)


def test_more_slots_than_the_pool_has_are_refused_and_leave_all_as_it_was() -> None:
    plans = FixedPlans(ROWS, SLOTS, CPU)
    plans.load([plan_of(FIRST)], 3)
    assert not plans.load([plan_of(SECOND), plan_of([[1] * (SLOTS - 5)])], 3)
    assert read(plans.plan(0, 3)) == FIRST
