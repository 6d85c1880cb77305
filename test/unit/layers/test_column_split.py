"""Products and attention that ranks share by columns have the bits of one rank, on every rank."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from column_gathers import memory_gathers, on_each, splits

from sgl_batch.kernel_loader import native_kernels
from sgl_batch.layers.column_split import ColumnSplit, shares
from sgl_batch.layers.packed_weights import PackedWeights
from sgl_batch.metrics.counters import Counters

RANKS = [1, 2, 3, 4]
# Arguments of PackedWeights.
ROUNDED = [{}, {"int8": True}, {"int8": True, "int8_rows": True}]


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize(
    ("columns", "ranks", "unit", "expected"),
    [
        (128, 2, 32, (0, 64, 128)),
        (100, 2, 32, (0, 64, 100)),
        (96, 2, 32, (0, 32, 96)),
        (7, 4, 1, (0, 1, 3, 5, 7)),
        (2, 4, 1, (0, 0, 1, 1, 2)),
        (0, 2, 32, (0, 0, 0)),
    ],
)
def test_shares_are_whole_units_but_for_the_last_column(columns, ranks, unit, expected):
    assert shares(columns, ranks, unit) == expected


@pytest.mark.parametrize("rounds", ROUNDED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("rows", [0, 1, 4, 70])
@pytest.mark.parametrize("outputs", [128, 200])
def test_a_product_that_ranks_share_has_the_bits_of_one_rank(rounds, dtype, num_ranks, rows, outputs):
    plain, bias, x = draw(outputs, 48, dtype=dtype), draw(outputs, dtype=dtype), draw(rows, 48, dtype=dtype)

    def product(weights: PackedWeights, split: ColumnSplit | None) -> torch.Tensor:
        weight = torch.nn.Parameter(plain.clone(), requires_grad=False)
        weights.add_linear(weight)
        weights.split.current = split
        return weights.linear(x, weight, bias)

    def shared(rank: int, split: ColumnSplit) -> torch.Tensor:
        return product(PackedWeights(native_kernels(), **rounds), split)

    expected = product(PackedWeights(native_kernels(), **rounds), None)
    assert all(same_bits(found, expected) for found in on_each(splits(num_ranks), shared))


def test_a_product_of_few_bytes_or_fewer_panels_than_ranks_is_not_shared():
    first, second = splits(2, least_bytes=1000)
    assert first.pays(1000, units=2)
    assert not first.pays(999, units=2)
    assert not second.pays(1000, units=1)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("rows", [0, 1, 70])
@pytest.mark.parametrize("inter", [128, 162])
def test_an_mlp_that_ranks_share_has_the_bits_of_one_rank(int8, dtype, num_ranks, rows, inter):
    gate_up, down, x = (draw(*shape, dtype=dtype) / 8 for shape in ((2 * inter, 130), (130, inter), (rows, 130)))

    def product(split: ColumnSplit | None) -> torch.Tensor:
        weights = PackedWeights(native_kernels(), int8=int8)
        own = [torch.nn.Parameter(one.clone(), requires_grad=False) for one in (gate_up, down)]
        weights.add_experts(*own)
        weights.split.current = split
        return weights.mlp(x, *own)

    expected, ends = product(None), splits(num_ranks)
    assert all(same_bits(found, expected) for found in on_each(ends, lambda _, split: product(split)))
    assert all(end.counters.counts["column_gathers"] == 2 for end in ends)


def test_ranks_compute_an_mlp_of_int8_rows_each_for_itself():
    gate_up, down, x = (draw(*shape, dtype=torch.bfloat16) / 8 for shape in ((256, 64), (64, 128), (7, 64)))
    weights = PackedWeights(native_kernels(), int8=True, int8_rows=True)
    weights.add_experts(gate_up, down)
    expected, ends = weights.mlp(x, gate_up, down), splits(2)
    weights.split.current = ends[0]
    assert same_bits(weights.mlp(x, gate_up, down), expected)
    assert ends[0].counters.counts["column_gathers"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_products_by_head_that_ranks_share_have_the_bits_of_one_rank(dtype, num_ranks):
    plain, x = draw(3, 10, 8, dtype=dtype), draw(5, 3, 8, dtype=dtype)

    def product(split: ColumnSplit | None) -> torch.Tensor:
        weights, weight = PackedWeights(native_kernels()), plain.clone()
        weights.add_by_head(weight)
        weights.split.current = split
        out = torch.full((5, 3, 10), float("nan"), dtype=dtype)
        weights.by_head(x, weight, out_THN=out)
        return weights.all_heads(out)

    expected = product(None)
    assert not expected.isnan().any()
    assert all(same_bits(found, expected) for found in on_each(splits(num_ranks), lambda _, split: product(split)))


def test_a_matrix_of_the_first_rank_and_those_of_each_come_to_all():
    given = [draw(3, 5, dtype=torch.float32) + rank for rank in range(3)]

    def both(rank: int, split: ColumnSplit) -> torch.Tensor:
        first = split.of_first(given[0] if rank == 0 else None, (3, 5), torch.float32)
        return torch.cat((first[:, None], split.of_each(given[rank])), 1)

    expected = torch.stack([given[0], *given], 1)
    assert all(same_bits(found, expected) for found in on_each(splits(3), both))


def test_gathers_are_counted_and_their_waits_are_stall():
    counters = [Counters(), Counters()]
    ends = [ColumnSplit(gather, one) for gather, one in zip(memory_gathers(2), counters, strict=True)]

    def gather(rank: int, split: ColumnSplit) -> torch.Tensor:
        with counters[rank].clock.part("attention"):
            return split.columns(4, 2, partial(lambda first, last: torch.ones(3, last - first)))

    on_each(ends, gather)
    assert all(one.counts["column_gathers"] == 1 for one in counters)
    assert all(one.counts["gathered_bytes"] == 3 * 4 * 4 for one in counters)
    assert all(one.clock.read()["stall"] > 0 for one in counters)
