"""Weights whose numbers have a form of 4 or 8 bits take no more, and compute what those of bfloat16 compute."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
from column_gathers import on_each, splits
from gloo_pairs import gloo_groups
from kernel_fp4 import of_codes
from kernel_int4 import of_integers
from torch.distributed import ProcessGroup

from sgl_batch.distributed.shared_arena import SharedArena, padded, shared_arena
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


@dataclass
class Rank:
    """A rank that shares matrices with another rank: of one form, of none, exact, and the two of an MLP."""

    group: ProcessGroup
    draw: Callable[..., torch.Tensor]
    packed: PackedWeights
    weights: list[torch.nn.Parameter] = field(default_factory=list)

    def given(self) -> list[torch.Tensor]:
        other = torch.randn(OUTPUTS, INPUTS, generator=generator(1)).bfloat16()
        of_mlp = [self.draw(512, INPUTS), self.draw(INPUTS, 256)]
        return [self.draw(OUTPUTS, INPUTS), other, self.draw(OUTPUTS, INPUTS), *of_mlp]

    def pack(self, arena: SharedArena | None) -> None:
        given = self.given()
        places = [one if arena is None else arena.empty(one.shape, one.dtype) for one in given]
        for index, (place, one) in enumerate(zip(places, given, strict=True)):
            if arena is not None and index % 2 == arena.index:
                place.copy_(one)
        if arena is not None:
            arena.barrier()
        self.weights = [torch.nn.Parameter(place, requires_grad=False) for place in places]
        plain, other, exact, gate_up, down = self.weights
        self.packed.add_linear(plain)
        self.packed.add_linear(other)
        self.packed.add_linear(exact, exact=True)
        self.packed.add_experts(gate_up, down)
        self.packed.settle()

    def share(self) -> SharedArena:
        room = sum(padded(one.nbytes) + self.packed.small_bytes(one) for one in self.given())
        arena = shared_arena(self.group, room)
        assert arena is not None
        self.packed.share(arena)
        self.pack(arena)
        arena.seal()
        return arena

    def products(self) -> list[torch.Tensor]:
        *linears, gate_up, down = self.weights
        return [
            *(self.packed.linear(rows(7), one) for one in linears),
            self.packed.mlp(rows(7), gate_up, down),
        ]


@pytest.mark.parametrize("draw", FORMS, ids=NAMES)
def test_ranks_hold_one_copy_in_the_form_that_one_of_them_finds_and_one_writes_to_its_own(draw):
    ranks = [Rank(group, draw, in_groups()) for group in gloo_groups(2)]
    with ThreadPoolExecutor(2) as pool:
        arenas = list(pool.map(Rank.share, ranks))
    alone = Rank(ranks[0].group, draw, in_groups())
    alone.pack(None)
    expected = alone.products()
    for rank, arena in zip(ranks, arenas, strict=True):
        assert [one.dtype for one in rank.weights] == [one.dtype for one in alone.weights]
        assert [one.nbytes for one in rank.weights] == [one.nbytes for one in alone.weights]
        assert all(one.data in arena for one in rank.weights)
        assert all(map(torch.equal, rank.products(), expected))
    for rank in (ranks[0], alone):
        with rank.packed.plain():
            assert all(map(torch.equal, rank.weights, rank.given()))
            rank.weights[0].mul_(2)
    assert all(map(torch.equal, ranks[0].products(), alone.products()))
    assert all(map(torch.equal, ranks[1].products(), expected))


def test_the_pages_of_the_larger_form_are_given_back():
    def held(draw: Callable[..., torch.Tensor]) -> int:
        def share(group: ProcessGroup) -> int:
            weights, arena = in_groups(), shared_arena(group, 48 << 20)
            assert arena is not None
            weights.share(arena)
            weight = torch.nn.Parameter(arena.empty((4096, 2048), torch.bfloat16), requires_grad=False)
            if arena.index == 0:
                weight.copy_(draw(4096, 2048))
            arena.barrier()
            weights.add_linear(weight)
            weights.settle()
            arena.seal()
            return arena.num_bytes

        with ThreadPoolExecutor(2) as pool:
            (held, _) = pool.map(share, gloo_groups(2))
        return held

    plain = held(lambda *shape: torch.randn(shape, generator=generator(1)).bfloat16())
    assert held(integers(128)) < plain / 2
