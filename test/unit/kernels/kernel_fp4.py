"""Experts whose weights are numbers of mxfp4: four bits lose nothing, and products have bfloat16's bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import sgl_batch_kernel as kernels
import torch
from kernel_checks import Check, refusals
from kernel_grouped import Form, GroupedWeight, expert_cases

# Hidden and intermediate.
SIZES = ((256, 64), (96, 160), (32, 32), (2080, 32))
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


def room(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(*shape[:-1], shape[-1] // 32 * 17, dtype=torch.uint8)


FP4 = Form(room, kernels.pack_fp4_, lambda packed, _: kernels.unpack_fp4(packed))


def loses_nothing(weight: torch.Tensor) -> bool:
    return GroupedWeight(FP4, weight).loses_nothing(signs_of_zeros=True)


def fits(weight: torch.Tensor) -> bool:
    return GroupedWeight(FP4, weight).fits


def fp4_cases() -> Iterator[Check]:
    for sizes in SIZES:
        for draw in (ordinary, few_numbers):
            name = f"fp4 experts {sizes[0]}x{sizes[1]} {draw.__name__}"
            yield from expert_cases(name, FP4, sizes, draw, signs_of_zeros=True)
    for power in (SMALLEST, 0, LARGEST):
        codes = torch.arange(16).repeat(2).expand(1, 32, 32)
        yield (
            f"fp4 of all numbers, 2^{power}",
            loses_nothing(of_codes(codes, torch.full((1, 32, 1), power))),
        )
    yield from numbers_that_are_none()
    yield from refused_cases()


def numbers_that_are_none() -> Iterator[Check]:
    for power, changed in ((0, 5.0), (0, 0.75), (0, 0.25), (0, 1.25), (0, 7.0), (0, 1e-40), (0, float("inf"))):
        weight = of_codes(torch.full((2, 64, 64), 7), torch.full((2, 64, 2), power))
        weight[1, 63, 63] = changed
        yield f"fp4: {changed} beside 6 is none of its numbers", not fits(weight)
    for power in (SMALLEST - 1, LARGEST + 1):
        weight = of_codes(torch.full((1, 32, 32), 7), torch.full((1, 32, 1), power))
        yield f"fp4 has no numbers of 2^{power}", not fits(weight)
    # 8 is the 4 of the next power of two, which has 0.5 and 6 as 1 and 12.
    weight = of_codes(torch.full((1, 32, 32), 6), torch.ones(1, 32, 1))
    weight[0, :, ::2] = 1.0
    yield "fp4: the largest number gives the power of two", loses_nothing(weight)


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
        ("weight is [64, 17] for 64 inputs", lambda: kernels.linear(x, packed[0, :, :17].contiguous())),
        ("fp4 of 48 outputs and 64 inputs; use multiples", lambda: kernels.linear(x, packed[0, :48])),
        ("fp4 of 48 outputs and 64 inputs; use multiples", lambda: kernels.gated(x, packed.view(-1, 34)[:96], 0, 32)),
    )
    yield from refusals("fp4", refused)
