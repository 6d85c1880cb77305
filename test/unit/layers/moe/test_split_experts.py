"""Experts that ranks share by columns give the bits of experts that one rank computes whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from column_gathers import on_each, splits

from sgl_batch.kernel_loader import native_kernels
from sgl_batch.layers.column_split import ColumnSplit
from sgl_batch.layers.moe.split_experts import MOST_ROWS, SplitExperts
from sgl_batch.layers.packed_weights import PackedWeights
from sgl_batch.metrics.counters import Counters

EXPERTS, HIDDEN, INTER, TOP_K = 8, 160, 136, 3


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def layer_of(dtype: torch.dtype, experts: slice = slice(None), *, seed: int = 0) -> Any:
    """Return a layer's experts, or some of them."""
    w13, w2 = draw(EXPERTS, 2 * INTER, HIDDEN, seed=seed) / 9, draw(EXPERTS, HIDDEN, INTER, seed=seed) / 9
    return SimpleNamespace(w13_weight=w13[experts].to(dtype).contiguous(), w2_weight=w2[experts].to(dtype).contiguous())


class Rank:
    """A rank with its part of the experts of two layers."""

    def __init__(self, split: ColumnSplit, dtype: torch.dtype, *, int8: bool = False) -> None:
        local = EXPERTS // split.size
        own = slice(split.rank * local, (split.rank + 1) * local)
        self.layers = [layer_of(dtype, own, seed=seed) for seed in range(2)]
        self.weights, self.counters = PackedWeights(native_kernels(), int8=int8), Counters()
        for layer in self.layers:
            self.weights.add_experts(layer.w13_weight, layer.w2_weight)
        self.split_experts = SplitExperts(self.layers, self.weights, split, self.counters)


def choice(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.stack(
        [torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(row))[:TOP_K] for row in range(rows)]
    )
    return draw(rows, TOP_K).abs(), ids


def whole(dtype: torch.dtype, number: int, x: torch.Tensor) -> torch.Tensor:
    weights, layer = PackedWeights(native_kernels()), layer_of(dtype, seed=number)
    weights.add_experts(layer.w13_weight, layer.w2_weight)
    return weights.experts(x, layer.w13_weight, layer.w2_weight, *choice(len(x)), f32_output=True)[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("ranks", "rows"), [(2, 1), (2, 5), (4, 1), (4, MOST_ROWS)])
def test_columns_of_all_ranks_are_the_bits_of_whole_experts(dtype: torch.dtype, ranks: int, rows: int):
    x = draw(rows, HIDDEN).to(dtype)

    def run(rank: int, split: ColumnSplit) -> tuple[list[torch.Tensor], Counters]:
        own = Rank(split, dtype)
        own.split_experts.prepare()
        assert all(own.split_experts.takes(layer, rows) for layer in own.layers)
        return [own.split_experts.run(layer, x, *choice(rows)) for layer in own.layers], own.counters

    found = on_each(splits(ranks), run)
    for number in range(2):
        expected = whole(dtype, number, x)
        assert all(torch.equal(sums[number].view(torch.int32), expected.view(torch.int32)) for sums, _ in found)
    assert sum(counters.counts["expert_rows"] for _, counters in found) == 2 * rows * TOP_K, "each row is counted once"


def test_new_weights_are_copied_before_they_are_used():
    x = draw(2, HIDDEN)

    def run(rank: int, split: ColumnSplit) -> torch.Tensor:
        own = Rank(split, torch.float32)
        own.split_experts.prepare()
        changed = own.layers[0]
        with own.weights.plain():
            changed.w2_weight.mul_(2)
        assert not own.split_experts.takes(changed, 1)
        own.split_experts.prepare()
        return own.split_experts.run(changed, x, *choice(2))

    assert all(torch.equal(found, 2 * whole(torch.float32, 0, x)) for found in on_each(splits(2), run))


def test_many_rows_rounded_weights_and_too_few_columns_are_computed_whole():
    def run(rank: int, split: ColumnSplit) -> list[bool]:
        many, rounded = Rank(split, torch.float32), Rank(split, torch.float32, int8=True)
        for one in (many, rounded):
            one.split_experts.prepare()
        return [
            many.split_experts.takes(many.layers[0], MOST_ROWS + 1),
            rounded.split_experts.takes(rounded.layers[0], 1),
        ]

    assert on_each(splits(2), run) == [[False, False]] * 2

    def narrow(rank: int, split: ColumnSplit) -> bool:
        own = Rank(split, torch.float32)
        own.split_experts.prepare()
        return own.split_experts.takes(own.layers[0], 1)

    assert on_each(splits(8), narrow) == [False] * 8
