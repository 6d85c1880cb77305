"""Experts whose weights are numbers of mxfp4: four bits lose nothing, and products have bfloat16's bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import sgl_batch_kernel as kernels
import torch
from kernel_checks import Check, refusals
from kernel_coded import bits
from kernel_products import draw_routing

EXPERTS, TOP_K = 4, 2
# Hidden and intermediate.
SIZES = ((256, 64), (96, 160), (32, 32), (2080, 32))
# Of which each expert has half: so many that a panel meets one tile, several, several blocks, and some experts none.
TOKENS = (1, 2, 7, 24, 25, 50, 72, 160, 640)
NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# The powers of two whose numbers are all normal and finite in bfloat16.
SMALLEST, LARGEST = -125, 125


def of_codes(codes: torch.Tensor, powers: torch.Tensor) -> torch.Tensor:
    """Return numbers [..., K] by their codes [..., K] and the powers of two of 32 each [..., K / 32]."""
    numbers = torch.where(codes < 8, NUMBERS[codes % 8], -NUMBERS[codes % 8])
    whole = numbers.double().unflatten(-1, (-1, 32)) * torch.exp2(powers.double()).unsqueeze(-1)
    return whole.flatten(-2).bfloat16()


def ordinary(*shape: int) -> torch.Tensor:
    powers = torch.randint(-9, -5, (*shape[:-1], shape[-1] // 32))
    return of_codes(torch.randint(0, 16, shape), powers)


def few_numbers(*shape: int) -> torch.Tensor:
    """Blocks of one number each, of zeros of both signs, and of two numbers."""
    draws = torch.tensor([[0, 0], [8, 0], [1, 1], [3, 9], [2, 5], [7, 1], [15, 0]])
    kinds = torch.randint(0, len(draws), (*shape[:-1], shape[-1] // 32)).repeat_interleave(32, dim=-1)
    codes = draws[kinds, torch.randint(0, 2, shape)]
    return of_codes(codes, torch.randint(-6, 0, (*shape[:-1], shape[-1] // 32)))


def matrices(weight: torch.Tensor, halves: int) -> torch.Tensor:
    batch, n, k = weight.shape
    return weight.view(batch * halves, n // halves, k)


class Fp4Weight:
    """Packed matrices of bfloat16, and the same ones of four bits."""

    def __init__(self, weight: torch.Tensor, *, halves: int = 1) -> None:
        self.plain, self.packed = weight, weight.clone()
        kernels.pack_(matrices(self.packed, halves))
        self.fp4 = torch.full((*weight.shape[:2], weight.shape[2] // 32 * 17), 255, dtype=torch.uint8)
        self.fits = kernels.pack_fp4_(matrices(weight, halves), matrices(self.fp4, halves))
        self._halves = halves

    def loses_nothing(self) -> bool:
        back = kernels.unpack_fp4(matrices(self.fp4, self._halves)).view_as(self.plain)
        return self.fits and torch.equal(bits(back), bits(self.plain))


def fp4_cases() -> Iterator[Check]:
    for sizes in SIZES:
        for draw in (ordinary, few_numbers):
            yield from fp4_case(sizes, draw)
    for power in (SMALLEST, 0, LARGEST):
        codes = torch.arange(16).repeat(2).expand(1, 32, 32)
        yield (
            f"fp4 of all numbers, 2^{power}",
            Fp4Weight(of_codes(codes, torch.full((1, 32, 1), power))).loses_nothing(),
        )
    yield from numbers_that_are_none()
    yield from refused_cases()


def fp4_case(sizes: tuple[int, int], draw: Callable[..., torch.Tensor]) -> Iterator[Check]:
    hidden, inter = sizes
    name = f"fp4 experts {hidden}x{inter} {draw.__name__}"
    w13 = Fp4Weight(draw(EXPERTS, 2 * inter, hidden), halves=2)
    w2 = Fp4Weight(draw(EXPERTS, hidden, inter))
    yield name + ": nothing is lost", w13.loses_nothing() and w2.loses_nothing()
    biases = {"w13_bias": torch.randn(EXPERTS, 2 * inter), "w2_bias": torch.randn(EXPERTS, hidden)}
    clamped = {**biases, "alpha": 1.7, "limit": 7.0}
    for count in TOKENS:
        x, weights = torch.randn(count, hidden).bfloat16(), torch.rand(count, TOP_K)
        for routing in ("random", "some choices are absent"):
            choice = weights, draw_routing(routing, count, EXPERTS, TOP_K)
            more = clamped if count % 2 else {}
            exact = kernels.experts(x, w13.packed, w2.packed, *choice, f32_output=True, **more)
            found = kernels.experts(x, w13.fp4, w2.fp4, *choice, f32_output=True, **more)
            yield f"{name} {count} tokens, {routing}", all(map(torch.equal, found, exact))


def numbers_that_are_none() -> Iterator[Check]:
    for power, changed in ((0, 5.0), (0, 0.75), (0, 0.25), (0, 1.25), (0, 7.0), (0, 1e-40), (0, float("inf"))):
        weight = of_codes(torch.full((2, 64, 64), 7), torch.full((2, 64, 2), power))
        weight[1, 63, 63] = changed
        yield f"fp4: {changed} beside 6 is none of its numbers", not Fp4Weight(weight).fits
    for power in (SMALLEST - 1, LARGEST + 1):
        weight = of_codes(torch.full((1, 32, 32), 7), torch.full((1, 32, 1), power))
        yield f"fp4 has no numbers of 2^{power}", not Fp4Weight(weight).fits
    # 8 is the 4 of the next power of two, which has 0.5 and 6 as 1 and 12.
    weight = of_codes(torch.full((1, 32, 32), 6), torch.ones(1, 32, 1))
    weight[0, :, ::2] = 1.0
    yield "fp4: the largest number gives the power of two", Fp4Weight(weight).loses_nothing()


def refused_cases() -> Iterator[Check]:
    x, choice = torch.zeros(1, 64).bfloat16(), (torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32))
    weight, packed = torch.zeros(2, 64, 64, dtype=torch.bfloat16), torch.zeros(2, 64, 34, dtype=torch.uint8)
    refused: tuple[tuple[str, Callable[[], object]], ...] = (
        ("fp4 takes bfloat16 of multiples of 32 outputs", lambda: kernels.pack_fp4_(weight.float(), packed)),
        ("fp4 takes bfloat16 of multiples of 32", lambda: kernels.pack_fp4_(weight[:, :33].contiguous(), packed)),
        ("use uint8 [2, 64, 34]", lambda: kernels.pack_fp4_(weight, packed[:1])),
        ("w13 is Byte but w2 is BFloat16", lambda: kernels.experts(x, packed, weight[:, :, :32].contiguous(), *choice)),
        (
            "with marks of coded bfloat16",
            lambda: kernels.experts(x, packed, packed[:, :, :17].contiguous(), *choice, w13_marks=torch.zeros(4, 1)),
        ),
    )
    yield from refusals("fp4", refused)
