"""Experts over a combined batch equal a loop over tokens, however unevenly the router spreads them."""

from __future__ import annotations

import pytest
import torch

from sgl_batch.layers.moe.cpu_experts import combined_experts

EXPERTS, HIDDEN, INTERMEDIATE = 6, 16, 24

ROUTINGS = {
    "one token": [[4, 1]],
    "one token, one expert": [[5]],
    "one expert takes all": [[2]] * 50,
    "two experts take all": [[3, 0]] * 50,
    "every token another pair": [[a, b] for a in range(EXPERTS) for b in range(EXPERTS) if a != b],
    "the last expert has one row": [[0, 1]] * 40 + [[0, 5]],
    "every expert for every token": [[(token + k) % EXPERTS for k in range(EXPERTS)] for token in range(7)],
    "few rows each": [[0, 1], [1, 2], [2, 3], [3, 4]],
}


def inputs(num_tokens: int, dtype: torch.dtype, top_k: int):
    generator = torch.Generator().manual_seed(num_tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    x_TM = draw(num_tokens, HIDDEN).to(dtype)
    w13 = (draw(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / HIDDEN**0.5).to(dtype)
    w2 = (draw(EXPERTS, HIDDEN, INTERMEDIATE) / INTERMEDIATE**0.5).to(dtype)
    return x_TM, w13, w2, torch.rand(num_tokens, top_k, generator=generator)


def token_by_token(x_TM, w13, w2, weights_TK, ids_TK) -> torch.Tensor:
    """The definition, in float64: for each token the weighted sum of its experts' outputs."""
    out_TM = torch.zeros(x_TM.shape, dtype=torch.float64)
    for token, ids in enumerate(ids_TK.tolist()):
        for k, expert in enumerate(ids):
            projected = w13[expert].double() @ x_TM[token].double()
            gate, up = projected[:INTERMEDIATE], projected[INTERMEDIATE:]
            down = w2[expert].double() @ (gate * torch.sigmoid(gate) * up)
            out_TM[token] += weights_TK[token, k].double() * down
    return out_TM


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)], ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_combined_experts_equal_a_loop_over_tokens(routing, dtype, tolerance):
    ids_TK = torch.tensor(ROUTINGS[routing], dtype=torch.int32)
    x_TM, w13, w2, weights_TK = inputs(len(ids_TK), dtype, ids_TK.shape[1])
    out_TM, rows_per_expert = combined_experts(x_TM, w13, w2, weights_TK, ids_TK)
    expected = token_by_token(x_TM, w13, w2, weights_TK, ids_TK)
    assert out_TM.dtype == dtype
    assert torch.allclose(out_TM.double(), expected, rtol=tolerance, atol=tolerance)
    assert rows_per_expert.tolist() == [int((ids_TK == expert).sum()) for expert in range(EXPERTS)]


def test_a_token_keeps_its_result_wherever_it_stands_in_the_batch():
    ids_TK = torch.tensor(ROUTINGS["every token another pair"])
    x_TM, w13, w2, weights_TK = inputs(len(ids_TK), torch.float32, 2)
    out_TM, _ = combined_experts(x_TM, w13, w2, weights_TK, ids_TK)
    order = torch.randperm(len(ids_TK), generator=torch.Generator().manual_seed(0))
    moved_TM, _ = combined_experts(x_TM[order], w13, w2, weights_TK[order], ids_TK[order])
    assert torch.allclose(moved_TM, out_TM[order], rtol=1e-6, atol=1e-6)


def test_the_order_in_which_a_token_names_its_experts_makes_no_difference_beyond_rounding():
    ids_TK = torch.tensor(ROUTINGS["every expert for every token"])
    x_TM, w13, w2, weights_TK = inputs(len(ids_TK), torch.float32, EXPERTS)
    out_TM, _ = combined_experts(x_TM, w13, w2, weights_TK, ids_TK)
    turned_TM, _ = combined_experts(x_TM, w13, w2, weights_TK.flip(1), ids_TK.flip(1))
    assert torch.allclose(turned_TM, out_TM, rtol=1e-5, atol=1e-5)


def test_the_inputs_are_left_as_they_were():
    ids_TK = torch.tensor(ROUTINGS["two experts take all"])
    given = (*inputs(len(ids_TK), torch.float32, 2), ids_TK)
    before = [tensor.clone() for tensor in given]
    combined_experts(*given)
    assert all(torch.equal(old, new) for old, new in zip(before, given, strict=True))


def test_no_tokens_give_no_output_and_no_rows():
    w13, w2 = torch.ones(4, 12, 8), torch.ones(4, 8, 6)
    out, rows = combined_experts(torch.ones(0, 8), w13, w2, torch.ones(0, 2), torch.ones(0, 2, dtype=torch.int32))
    assert out.shape == (0, 8)
    assert rows.tolist() == [0] * 4
