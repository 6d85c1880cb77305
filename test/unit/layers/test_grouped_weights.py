"""Weights whose numbers have a form of 4 or 8 bits take no more, and compute what those of bfloat16 compute."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from column_gathers import on_each, splits
from gloo_pairs import gloo_groups
from kernel_fp4 import of_codes
from kernel_int4 import of_integers
from torch.distributed import ProcessGroup

from sgl_batch.distributed.shared_arena import shared_arena
from sgl_batch.kernel_loader import native_kernels
from sgl_batch.layers.column_split import ColumnSplit
from sgl_batch.layers.packed_weights import PackedWeights

OUTPUTS, INPUTS = 128, 256


def generator(*shape: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(shape))


def mxfp4(*shape: int) -> torch.Tensor:
    """Return numbers of which 32 neighbours have a power of two, the largest always among them."""
    own = generator(*shape)
    codes = torch.randint(0, 16, shape, generator=own)
    codes[..., ::32] = 7
    return of_codes(codes, torch.randint(-9, -5, (*shape[:-1], shape[-1] // 32), generator=own))


def integers(group: int) -> Callable[..., torch.Tensor]:
    def drawn(*shape: int) -> torch.Tensor:
        own = generator(*shape)
        scales = torch.rand(*shape[:-1], shape[-1] // group, generator=own).half() / 100 + 1e-3
        return of_integers(torch.randint(-8, 8, shape, generator=own), scales)

    return drawn


def fp8(group: int) -> Callable[..., torch.Tensor]:
    def drawn(*shape: int) -> torch.Tensor:
        own = generator(*shape)
        codes = torch.randint(0, 127, shape, generator=own) + 128 * torch.randint(0, 2, shape, generator=own)
        numbers = codes.to(torch.uint8).view(torch.float8_e4m3fn).float().unflatten(-1, (-1, group))
        scales = torch.rand(*shape[:-1], shape[-1] // group, 1, generator=own) / 10000 + 1e-5
        return (numbers * scales).flatten(-2).bfloat16()

    return drawn


def int8(group: int) -> Callable[..., torch.Tensor]:
    def drawn(*shape: int) -> torch.Tensor:
        own = generator(*shape)
        scales = torch.rand(*shape[:-1], shape[-1] // group, generator=own) / 1000 + 1e-4
        return of_integers(torch.randint(-128, 128, shape, generator=own), scales)

    return drawn


FORMS = [mxfp4, integers(32), integers(64), integers(128), fp8(32), fp8(128), int8(32), int8(128)]
BITS = [4.25, 5.0, 4.5, 4.25, 9.0, 8.25, 9.0, 8.25]
NAMES = [
    "mxfp4",
    *(f"integers by {group}" for group in (32, 64, 128)),
    *(f"{name} by {group}" for name in ("fp8", "int8") for group in (32, 128)),
]


def rows(count: int, inputs: int = INPUTS) -> torch.Tensor:
    return torch.randn(count, inputs, generator=generator(count, inputs)).bfloat16()


def in_groups() -> PackedWeights:
    return PackedWeights(native_kernels(), coded=True, grouped=True)


def in_sixteen() -> PackedWeights:
    return PackedWeights(native_kernels())


@pytest.mark.parametrize(("draw", "num_bits"), list(zip(FORMS, BITS, strict=True)), ids=NAMES)
@pytest.mark.parametrize("count", [1, 5, 40])
def test_a_product_has_the_bits_of_bfloat16_in_4_or_8_bits_a_number(draw, num_bits, count):
    small, large, bias = draw(OUTPUTS, INPUTS), draw(OUTPUTS, INPUTS), draw(1, OUTPUTS)[0]
    grouped, sixteen = in_groups(), in_sixteen()
    grouped.add_linear(small)
    sixteen.add_linear(large)
    assert small.nbytes * 8 == num_bits * OUTPUTS * INPUTS
    assert torch.equal(grouped.linear(rows(count), small, bias), sixteen.linear(rows(count), large, bias))


def mlp(weights: PackedWeights, draw: Callable[..., torch.Tensor], count: int) -> tuple[torch.Tensor, torch.dtype]:
    """Return what an MLP gives, and the number type in which its weights lie."""
    gate_up, down = (torch.nn.Parameter(draw(*shape), requires_grad=False) for shape in ((512, 128), (128, 256)))
    weights.add_experts(gate_up, down)
    return weights.mlp(rows(count, 128), gate_up, down), down.dtype


@pytest.mark.parametrize("draw", FORMS, ids=NAMES)
@pytest.mark.parametrize("count", [1, 40])
def test_an_mlp_has_the_bits_of_bfloat16(draw, count):
    (small, kept), (large, _) = mlp(in_groups(), draw, count), mlp(in_sixteen(), draw, count)
    assert kept in (torch.uint8, torch.int32, torch.float8_e4m3fn, torch.int16)
    assert torch.equal(small, large)


@pytest.mark.parametrize("draw", [integers(64), fp8(128), int8(128)], ids=["integers", "fp8", "int8"])
def test_an_mlp_has_one_form_and_16_bits_where_a_half_has_none(draw):
    gate_up, down = draw(512, 128), torch.randn(128, 256).bfloat16()
    grouped = in_groups()
    grouped.add_experts(gate_up, down)
    assert gate_up.dtype == down.dtype == torch.bfloat16
    assert not grouped.has_codes, "codes are for many experts"


def test_an_mlp_of_fp8_has_the_groups_that_both_halves_have():
    grouped, gate_up, down = in_groups(), fp8(128)(512, 128), fp8(32)(128, 256)
    grouped.add_experts(gate_up, down)
    assert gate_up.nbytes * 8 == 9 * 512 * 128
    assert down.nbytes * 8 == 9 * 128 * 256


def test_what_must_stay_exact_and_other_number_types_stay_as_they_are():
    grouped, exact, wide = in_groups(), mxfp4(OUTPUTS, INPUTS), mxfp4(OUTPUTS, INPUTS).float()
    narrow = mxfp4(OUTPUTS - 8, INPUTS)
    grouped.add_linear(exact, exact=True)
    grouped.add_linear(wide)
    grouped.add_linear(narrow)
    assert [one.dtype for one in (exact, wide, narrow)] == [torch.bfloat16, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("draw", FORMS, ids=NAMES)
def test_a_weight_is_plain_while_it_is_written_and_finds_its_form_anew(draw):
    grouped, weight, plain = in_groups(), draw(OUTPUTS, INPUTS), draw(OUTPUTS, INPUTS)
    grouped.add_linear(weight)
    size = weight.nbytes
    with grouped.plain():
        assert torch.equal(weight, plain)
        weight.mul_(2)
    assert weight.nbytes == size
    with grouped.plain():
        assert torch.equal(weight, 2 * plain)
        weight.copy_(torch.randn(OUTPUTS, INPUTS, generator=generator(1)))
    assert weight.dtype == torch.bfloat16
    with grouped.plain():
        assert torch.equal(weight, torch.randn(OUTPUTS, INPUTS, generator=generator(1)).bfloat16())
        weight.copy_(plain)
    assert weight.nbytes == size


@pytest.mark.parametrize("draw", FORMS, ids=NAMES)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_ranks_share_by_columns_has_the_bits_of_one_rank(draw, num_ranks):
    def products(weights: PackedWeights, split: ColumnSplit | None) -> list[torch.Tensor]:
        weight = draw(OUTPUTS, INPUTS)
        weights.add_linear(weight)
        weights.split.current = split
        return [weights.linear(rows(5), weight), mlp(weights, draw, 5)[0]]

    expected, ends = products(in_sixteen(), None), splits(num_ranks)
    for found in on_each(ends, lambda _, split: products(in_groups(), split)):
        assert all(map(torch.equal, found, expected))
    assert all(end.counters.counts["column_gathers"] == 3 for end in ends)


def test_weights_in_memory_that_ranks_share_stay_in_16_bits():
    def shared(group: ProcessGroup) -> tuple[torch.Tensor, PackedWeights]:
        grouped, arena = in_groups(), shared_arena(group, 1 << 20)
        assert arena is not None
        grouped.share(arena)
        weight = arena.empty((OUTPUTS, INPUTS), torch.bfloat16)
        if group.rank() == 0:
            weight.copy_(mxfp4(OUTPUTS, INPUTS))
        arena.barrier()
        grouped.add_linear(weight)
        arena.seal()
        return weight, grouped

    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(shared, gloo_groups(2)))
    alone, weight = in_groups(), mxfp4(OUTPUTS, INPUTS)
    alone.add_linear(weight)
    for own, grouped in ranks:
        assert own.dtype == torch.bfloat16
        assert torch.equal(grouped.linear(rows(7), own), alone.linear(rows(7), weight))
