"""Experts whose weights are floats of 8 bits times scales: they stay so small, and products have bfloat16's bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import sgl_batch_kernel as kernels
import torch
from kernel_checks import Check, refusals
from kernel_coded import bits
from kernel_grouped import Form, GroupedWeight, expert_cases

# Hidden and intermediate, by how many numbers have one scale.
SIZES = {32: ((96, 160), (2080, 32)), 128: ((384, 128), (128, 256))}
LARGEST = 448.0
# All numbers but those of the other sign, zero first.
MAGNITUDES = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
# With larger scales the largest number is beyond what has a code, with smaller ones not all numbers are normal.
LEAST_SCALE, MOST_SCALE = 2.0**-107, 2.0**6


def form_of(group: int) -> Form:
    def room(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(*shape[:-1], shape[-1] + 4 * shape[-1] // group, dtype=torch.float8_e4m3fn)

    return Form(room, kernels.pack_fp8_, kernels.unpack_fp8)


def of_floats(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return numbers [..., K] times the scales of groups [..., groups], rounded to bfloat16 once."""
    return (numbers.unflatten(-1, (scales.shape[-1], -1)) * scales.unsqueeze(-1)).flatten(-2).bfloat16()


def rounded(shape: tuple[int, ...]) -> torch.Tensor:
    """Draw numbers as rounding makes them, with all steps below the least normal one."""
    return (torch.randn(shape) * torch.where(torch.rand(shape) < 0.1, 2e-3, 90.0)).to(torch.float8_e4m3fn).float()


def by_blocks(group: int, *shape: int) -> torch.Tensor:
    """Every group has a scale for all outputs."""
    scales = torch.rand(1, 1, shape[-1] // group) * 1e-3 + 1e-5
    return of_floats(rounded(shape), scales.expand(*shape[:-1], -1))


def by_rows(group: int, *shape: int) -> torch.Tensor:
    """Every output has a scale."""
    scales = torch.rand(*shape[:-1], 1) * 1e-3 + 1e-5
    return of_floats(rounded(shape), scales.expand(-1, -1, shape[-1] // group))


def of_few(group: int, *shape: int) -> torch.Tensor:
    """Groups of zeros of both signs, of one number, and of two; beside some outputs whose groups have one scale."""
    groups = (*shape[:-1], shape[-1] // group)
    step = 2.0**-9
    draws = torch.tensor(
        [[0, -0.0], [-0.0, -0.0], [448, 448], [-240, 0], [448, step], [7 * step, -3 * step], [1, -1.125]]
    )
    kinds = torch.randint(0, len(draws), groups).repeat_interleave(group, dim=-1)
    scales = torch.where(torch.arange(shape[-2]) // 32 % 2 == 0, 1e-3, torch.rand(groups[:-1]) + 0.5)
    return of_floats(draws[kinds, torch.randint(0, 2, shape)], scales.unsqueeze(-1).expand(groups))


def fp8_cases() -> Iterator[Check]:
    for group, all_sizes in SIZES.items():
        for sizes in all_sizes:
            for draw in (by_blocks, by_rows, of_few):
                name = f"fp8 by {group} experts {sizes[0]}x{sizes[1]} {draw.__name__}"
                yield from expert_cases(name, form_of(group), sizes, partial(draw, group), signs_of_zeros=True)
        yield from numbers_of_all_scales(group)
        yield from numbers_that_are_none(group)
    yield from widened_cases()
    yield from refused_cases()


def numbers_of_all_scales(group: int) -> Iterator[Check]:
    """All numbers up to each of the largest ones, with all scales of bfloat16 and some of float32.

    Many products lie halfway between numbers of bfloat16.
    """
    every = MAGNITUDES.repeat(2)[:128].view(-1, group)
    signs = torch.where(torch.arange(group) % 3 == 0, -1.0, 1.0)
    scales = torch.cat((torch.arange(128, 256) * 2.0**-16, torch.rand(128) * 2.0**-9 + 2.0**-9)).view(-1, 1, 1)
    for up_to in (448.0, 416.0, 288.0, 240.0, 15.0, 2.0**-6, 7 * 2.0**-9):
        numbers = torch.where(every <= up_to, every, 0.0) * signs
        for name, own in (("of an output", scales.view(8, 32, 1)), ("of all", scales.expand(-1, 32, 1))):
            weights = [
                GroupedWeight(form_of(group), of_floats(some.expand(len(own), 32, group), own)) for some in numbers
            ]
            yield (
                f"fp8 by {group}: scales {name}, numbers up to {up_to}",
                all(weight.loses_nothing(signs_of_zeros=True) for weight in weights),
            )
    for scale in (LEAST_SCALE, MOST_SCALE):
        weight = GroupedWeight(form_of(group), of_floats(every[-1].expand(1, 32, group), torch.full((1, 32, 1), scale)))
        yield f"fp8 by {group}: scale {scale}", weight.loses_nothing(signs_of_zeros=True)


def numbers_that_are_none(group: int) -> Iterator[Check]:
    form = form_of(group)
    for changed in (LARGEST * 1.03125, 18.5, 1.0625, 2.0**-10, 2.0**-9 * 1.5, 1e-40, float("inf"), float("nan")):
        weight = MAGNITUDES[-2 * group :].repeat(3)[: 2 * group].bfloat16().expand(2, 64, 2 * group).clone()
        weight[..., group] = LARGEST
        weight[1, 63, -1] = changed
        yield f"fp8 by {group}: {changed} beside numbers up to {LARGEST} is none", not GroupedWeight(form, weight).fits
    two = torch.cat((torch.full((1, 32, group // 2), 1.0), torch.full((1, 32, group // 2), 1.3)), dim=-1)
    all_of_eight = (torch.arange(group) % 8 + 8).float()
    yield f"fp8 by {group}: two scales are none", not GroupedWeight(form, (two * all_of_eight).bfloat16()).fits
    yield (
        f"fp8 by {group}: numbers at random are none",
        not GroupedWeight(form, torch.randn(1, 32, group).bfloat16()).fits,
    )
    for scale in (LEAST_SCALE / 1024, MOST_SCALE * 4):
        weight = torch.full((1, 32, group), LARGEST * scale).bfloat16()
        yield f"fp8 by {group} has no numbers of {scale}", not GroupedWeight(form, weight).fits


def widened_cases() -> Iterator[Check]:
    """All codes, those that are no numbers among them, with a scale for each block, output or matrix."""
    for rows, columns, block in ((256, 256, (128, 128)), (33, 300, (1, 300)), (130, 96, (130, 96)), (65, 40, (32, 16))):
        codes = (
            torch.arange(rows * columns).remainder(256).to(torch.uint8).view(torch.float8_e4m3fn).view(rows, columns)
        )
        scales = torch.rand(-(-rows // block[0]), -(-columns // block[1])) * 2.0 ** torch.randint(-20, 9, (1,)).item()
        of_rows = scales.repeat_interleave(block[0], dim=0)[:rows]
        expected = (codes.float() * of_rows.repeat_interleave(block[1], dim=1)[:, :columns]).bfloat16()
        out = torch.empty(rows, columns, dtype=torch.bfloat16)
        kernels.widen_fp8_(codes, scales, *block, out)
        numbers = ~expected.isnan()
        yield (
            f"widen fp8 {rows}x{columns} by {block}",
            torch.equal(out.isnan(), expected.isnan()) and torch.equal(bits(out[numbers]), bits(expected[numbers])),
        )


def refused_cases() -> Iterator[Check]:
    x, choice = torch.zeros(1, 64).bfloat16(), (torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32))
    weight = torch.zeros(2, 64, 64, dtype=torch.bfloat16)
    packed = torch.zeros(2, 64, 72, dtype=torch.uint8).view(torch.float8_e4m3fn)
    wide = torch.zeros(64, 72, dtype=torch.bfloat16)
    by_128 = torch.zeros(2, 128, 132, dtype=torch.uint8).view(torch.float8_e4m3fn)
    refused: tuple[tuple[str, Callable[[], object]], ...] = (
        ("fp8 takes bfloat16 of multiples of 32 outputs", lambda: kernels.pack_fp8_(weight.float(), packed)),
        ("fp8 takes bfloat16 of multiples of 32", lambda: kernels.pack_fp8_(weight[:, :33].contiguous(), packed)),
        ("no fp8 of 64 inputs in groups of", lambda: kernels.pack_fp8_(weight, packed[:, :, :66].contiguous())),
        ("fp8 is float8_e4m3fn", lambda: kernels.pack_fp8_(weight, packed.view(torch.uint8))),
        ("packed is [1, 64, 72] for a weight [2, 64, 64]", lambda: kernels.pack_fp8_(weight, packed[:1])),
        ("no fp8 of 96 inputs", lambda: kernels.unpack_fp8(packed, 96)),
        ("but w2 is BFloat16", lambda: kernels.experts(x, packed, weight[:, :, :32].contiguous(), *choice)),
        ("no fp8 of 64 inputs", lambda: kernels.experts(x, packed[:, :, :66].contiguous(), packed, *choice)),
        (
            "groups of another size",
            lambda: kernels.experts(torch.zeros(1, 128), by_128, packed[:, :, :36].repeat(1, 2, 2), *choice),
        ),
        (
            "with marks of coded bfloat16",
            lambda: kernels.experts(x, packed.repeat(1, 2, 1), packed, *choice, w13_marks=torch.zeros(4, 2)),
        ),
        ("out is BFloat16[2, 64]", lambda: kernels.widen_fp8_(packed[0], torch.ones(1, 1), 64, 72, weight[0, :2])),
        (
            "scales are Float[1, 1]; use float32 [2, 1]",
            lambda: kernels.widen_fp8_(packed[0], torch.ones(1, 1), 32, 72, wide),
        ),
        ("blocks of 0 x 72", lambda: kernels.widen_fp8_(packed[0], torch.ones(1, 1), 0, 72, wide)),
        ("no fp8 of 64 inputs", lambda: kernels.linear(x, packed[0, :, :66].contiguous())),
        ("fp8 of 31 outputs; use a multiple of 32", lambda: kernels.linear(x, packed[0, :31])),
        ("fp8 of 48 outputs; use a multiple of 32", lambda: kernels.gated(x, packed.view(-1, 72)[:96], 0, 32)),
    )
    yield from refusals("fp8", refused)
