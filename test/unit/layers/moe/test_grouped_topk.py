"""DeepSeek's choice of experts, against a choice made row by row in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from sgl_batch.kernel_loader import native_kernels
from sgl_batch.layers.moe.grouped_topk import Grouping, grouped_topk

EXPERTS, TOP_K = 16, 4
KERNELS = {"native": native_kernels(), "torch": None}
operators = pytest.mark.parametrize("operators", ["native", "torch"])
groupings = pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (4, 4), (8, 3)])


def draw(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, EXPERTS, generator=generator), torch.randn(EXPERTS, generator=generator) / 2


def chosen_by_hand(logits: list[float], bias: list[float] | None, grouping: Grouping) -> dict[int, float]:
    """Scores of the experts that a row chooses, by id; with a bias as V3, without as V2."""
    if bias is None:
        total = sum(math.exp(x) for x in logits)
        scores = [math.exp(x) / total for x in logits]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    ranked = [score + (bias[i] if bias else 0.0) for i, score in enumerate(scores)]
    size = EXPERTS // grouping.groups
    groups = [range(start, start + size) for start in range(0, EXPERTS, size)]
    best = 1 if bias is None else 2
    groups.sort(key=lambda group: -sum(sorted((ranked[i] for i in group), reverse=True)[:best]))
    allowed = [i for group in groups[: grouping.kept_groups] for i in group]
    return {i: scores[i] for i in sorted(allowed, key=lambda i: -ranked[i])[: grouping.top_k]}


@operators
@groupings
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_each_row_chooses_the_best_experts_of_its_best_groups(operators, scoring, renormalize, groups, kept):
    grouping = Grouping(groups=groups, kept_groups=kept, top_k=TOP_K)
    logits, bias = draw(50)
    given = bias if scoring == "sigmoid" else None
    weights, ids = grouped_topk(
        logits, grouping, scoring=scoring, bias_E=given, renormalize=renormalize, kernels=KERNELS[operators]
    )
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    for row in range(len(logits)):
        expected = chosen_by_hand(logits[row].tolist(), None if given is None else bias.tolist(), grouping)
        total = sum(expected.values()) if renormalize else 1.0
        found = dict(zip(ids[row].tolist(), weights[row].tolist(), strict=True))
        assert found == pytest.approx({i: score / total for i, score in expected.items()}, rel=1e-5)


@operators
@groupings
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_row_has_the_same_bits_whatever_the_other_rows_are(operators, scoring, groups, kept):
    grouping = Grouping(groups=groups, kept_groups=kept, top_k=TOP_K)
    logits, bias = draw(67)
    options = {
        "scoring": scoring,
        "bias_E": bias if scoring == "sigmoid" else None,
        "renormalize": True,
        "kernels": KERNELS[operators],
    }
    weights, ids = grouped_topk(logits, grouping, **options)
    for size in (1, 2, 3, 33):
        parts = [grouped_topk(part, grouping, **options) for part in logits.split(size)]
        assert torch.equal(torch.cat([part[0] for part in parts]), weights)
        assert torch.equal(torch.cat([part[1] for part in parts]), ids)


@operators
def test_a_bias_moves_the_choice_and_not_the_weights(operators):
    logits, bias = torch.zeros(1, EXPERTS), torch.zeros(EXPERTS)
    bias[5:9] = 1.0
    grouping = Grouping(groups=1, kept_groups=1, top_k=TOP_K)
    weights, ids = grouped_topk(
        logits, grouping, scoring="sigmoid", bias_E=bias, renormalize=False, kernels=KERNELS[operators]
    )
    assert sorted(ids[0].tolist()) == [5, 6, 7, 8]
    assert weights.eq(0.5).all()


@operators
def test_no_rows_choose_nothing(operators):
    grouping = Grouping(groups=4, kept_groups=2, top_k=TOP_K)
    weights, ids = grouped_topk(
        torch.empty(0, EXPERTS),
        grouping,
        scoring="sigmoid",
        bias_E=torch.zeros(EXPERTS),
        renormalize=True,
        kernels=KERNELS[operators],
    )
    assert weights.shape == ids.shape == (0, TOP_K)
