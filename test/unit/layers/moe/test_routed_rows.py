"""The layout for grouped GEMMs holds each routed row once, in a block of its expert, whatever the routing."""

from __future__ import annotations

import pytest
import torch

from sgl_batch.layers.moe.routed_rows import route, tree_paths

EXPERTS = 5
ROUTINGS = {
    "no token": torch.empty(0, 2, dtype=torch.int32),
    "one token": torch.tensor([[4, 1]]),
    "one expert takes all": torch.full((40, 1), 3),
    "absent choices": torch.tensor([[-1, -1], [2, -1], [-1, 0]]),
    "several blocks": torch.randint(-1, EXPERTS, (90, 3), generator=torch.Generator().manual_seed(0)),
    "full blocks": torch.tensor([[0, 1]] * 32),
}


@pytest.mark.parametrize("block_rows", [1, 16, 32])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_row_of_an_expert_has_one_cell_in_a_block_of_that_expert(routing, block_rows):
    ids_TK = ROUTINGS[routing]
    rows = route(ids_TK, torch.rand(ids_TK.shape), num_experts=EXPERTS, block_rows=block_rows)
    expert_S = rows.block_expert_B.repeat_interleave(block_rows)
    used_S = rows.cell_row_S >= 0
    expert_R = rows.ids_TK.flatten()
    assert torch.equal(expert_R[rows.cell_row_S[used_S]], expert_S[used_S])
    assert sorted(rows.cell_row_S[used_S].tolist()) == torch.where(expert_R < EXPERTS)[0].tolist()
    assert rows.rows_per_expert.tolist() == [int((ids_TK == expert).sum()) for expert in range(EXPERTS)]
    assert rows.block_expert_B.tolist() == sorted(rows.block_expert_B.tolist()), "idle blocks come last"


def test_a_tokens_choices_are_in_order_of_experts_and_absent_ones_come_last():
    ids_TK = torch.tensor([[3, -1, 0], [1, 4, 2]])
    weights_TK = torch.tensor([[0.3, 0.9, 0.1], [0.1, 0.4, 0.2]])
    rows = route(ids_TK, weights_TK, num_experts=EXPERTS, block_rows=4)
    assert rows.ids_TK.tolist() == [[0, 3, EXPERTS], [1, 2, 4]]
    expected = torch.tensor([[0.1, 0.3, 0.9], [0.1, 0.2, 0.4]])
    assert torch.equal(rows.weights_TK, expected)


def shared_depth(a: int, b: int, experts: int) -> int:
    """Return how many halvings of [0, experts) keep a and b together; the middle of an odd number goes to the first."""
    low, high, depth = 0, experts, 0
    while high - low > 1:
        middle = low + (high - low + 1) // 2
        if (a < middle) != (b < middle):
            return depth
        low, high = (low, middle) if b < middle else (middle, high)
        depth += 1
    return depth


@pytest.mark.parametrize("experts", [1, 2, 3, 5, 8, 12, 60])
def test_experts_that_part_later_differ_in_a_lower_bit_of_their_paths(experts):
    paths = tree_paths(experts, torch.device("cpu")).tolist()
    levels = max(path.bit_length() for path in paths)
    for a in range(experts):
        for b in range(a + 1, experts):
            assert levels - (paths[a] ^ paths[b]).bit_length() == shared_depth(a, b, experts)
