"""Experts whose weights are integers of 4 bits times scales: they stay so small, and products have bfloat16's bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import sgl_batch_kernel as kernels
import torch
from kernel_checks import Check, refusals
from kernel_coded import bits
from kernel_grouped import Form, GroupedWeight, expert_cases

# Hidden and intermediate, by how many numbers have one scale.
SIZES = {32: ((96, 160), (2080, 32)), 64: ((256, 64), (64, 192)), 128: ((384, 128), (128, 256))}
# Far beyond those of checkpoints.
LEAST_SCALE, MOST_SCALE = 2.0**-95, 2.0**95


def form_of(group: int) -> Form:
    def room(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(*shape[:-1], shape[-1] // 8 + shape[-1] // group, dtype=torch.int32)

    return Form(room, kernels.pack_int4_, kernels.unpack_int4)


def of_integers(integers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return numbers [..., K] of signed integers and the scales of groups [..., groups], rounded to bfloat16 once."""
    grouped = integers.float().unflatten(-1, (scales.shape[-1], -1))
    return (grouped * scales.float().unsqueeze(-1)).flatten(-2).bfloat16()


def with_zeros(group: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Integers of all zero points, and scales of both signs, which leave zeros of both."""
    groups = (*shape[:-1], shape[-1] // group)
    zeros = torch.randint(0, 16, groups).repeat_interleave(group, dim=-1)
    scales = (torch.rand(groups) * 0.01 + 1e-3) * torch.where(torch.rand(groups) < 0.1, -1.0, 1.0)
    return of_integers(torch.randint(0, 16, shape) - zeros, scales.to(dtype))


def of_few(group: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Groups of zeros, of one number, of two, and of even integers alone."""
    groups = (*shape[:-1], shape[-1] // group)
    draws = torch.tensor([[0, 0], [5, 5], [-7, 8], [-8, 0], [2, -4], [15, 0], [-15, -1], [1, 0]])
    kinds = torch.randint(0, len(draws), groups).repeat_interleave(group, dim=-1)
    return of_integers(draws[kinds, torch.randint(0, 2, shape)], (torch.rand(groups) + 0.5).to(dtype))


def int4_cases() -> Iterator[Check]:
    for group, all_sizes in SIZES.items():
        for sizes in all_sizes:
            for draw, dtype in ((with_zeros, torch.float16), (with_zeros, torch.bfloat16), (of_few, torch.float16)):
                name = f"int4 by {group} experts {sizes[0]}x{sizes[1]} {draw.__name__} {dtype}"
                numbers = partial(draw, group, dtype)
                yield from expert_cases(name, form_of(group), sizes, numbers, signs_of_zeros=False)
        yield from numbers_of_all_scales(group)
        yield from numbers_that_are_none(group)
    yield from widened_cases()
    yield from refused_cases()


def numbers_of_all_scales(group: int) -> Iterator[Check]:
    """Every scale of float16's 11 bits, with all integers: many multiples lie halfway between numbers of bfloat16."""
    scales = (torch.arange(1024, 2048) * 2.0**-16).view(1, 1024, 1)
    for least in (-8, -15, 0, -3):
        integers = (torch.arange(group) % 16 + least).expand(1, 1024, group)
        weight = GroupedWeight(form_of(group), of_integers(integers, scales))
        yield f"int4 by {group}: all scales, integers from {least}", weight.loses_nothing(signs_of_zeros=False)
    for scale in (LEAST_SCALE, MOST_SCALE):
        integers = (torch.arange(group) % 16 - 8).expand(1, 32, group)
        weight = GroupedWeight(form_of(group), of_integers(integers, torch.full((1, 32, 1), scale)))
        yield f"int4 by {group}: scale {scale}", weight.loses_nothing(signs_of_zeros=False)


def numbers_that_are_none(group: int) -> Iterator[Check]:
    for least, changed in ((-8, 8.0), (0, -1.0), (-8, 0.5), (-8, 3.03125), (-8, 1e-40), (-8, float("inf"))):
        weight = (torch.arange(2 * group) % 16 + least).bfloat16().expand(2, 64, 2 * group).clone()
        weight[1, 63, -1] = changed
        yield (
            f"int4 by {group}: {changed} beside integers from {least} is none",
            not GroupedWeight(form_of(group), weight).fits,
        )
    two = torch.cat((torch.full((1, 32, group // 2), 0.75), torch.full((1, 32, group // 2), 0.8125)), dim=-1)
    odd = torch.arange(group) % 16 - 8
    yield f"int4 by {group}: two scales are none", not GroupedWeight(form_of(group), (two * odd).bfloat16()).fits
    random = torch.randn(1, 32, group).bfloat16()
    yield f"int4 by {group}: numbers at random are none", not GroupedWeight(form_of(group), random).fits


def widened_cases() -> Iterator[Check]:
    """Integers as checkpoints have them: in words by output or by input, or one a byte."""
    for rows, inputs, groups in ((64, 256, 2), (33, 96, 3), (70, 40, 1), (1, 16, 8)):
        words = torch.randint(-(2**31), 2**31, (rows, inputs // 8), dtype=torch.int32)
        integers = torch.stack([(words >> (4 * i)) & 15 for i in range(8)], dim=-1).flatten(1)
        lacks, scales = torch.randint(0, 16, (rows, groups)).float(), torch.randn(rows, groups)
        grouped = integers.float().unflatten(1, (groups, -1))
        expected = ((grouped - lacks.unsqueeze(2)) * scales.unsqueeze(2)).flatten(1).bfloat16()
        by_input = words.t().contiguous().t()
        for name, given in (("words", words), ("words by input", by_input), ("bytes", integers.to(torch.uint8))):
            out = torch.empty(rows, inputs, dtype=torch.bfloat16)
            kernels.widen_integers_(given, lacks, scales, out)
            yield f"widen integers {rows}x{inputs}, {groups} groups, {name}", torch.equal(bits(out), bits(expected))


def refused_cases() -> Iterator[Check]:
    x, choice = torch.zeros(1, 64).bfloat16(), (torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32))
    weight, packed = torch.zeros(2, 64, 64, dtype=torch.bfloat16), torch.zeros(2, 64, 10, dtype=torch.int32)
    plain, one, two = torch.zeros(2, 16, dtype=torch.bfloat16), torch.zeros(2, 1), torch.zeros(2, 2)
    each = torch.zeros(2, 8)
    refused: tuple[tuple[str, Callable[[], object]], ...] = (
        ("int4 takes bfloat16 of multiples of 32 outputs", lambda: kernels.pack_int4_(weight.float(), packed)),
        ("int4 takes bfloat16 of multiples of 32", lambda: kernels.pack_int4_(weight[:, :33].contiguous(), packed)),
        ("no int4 of 64 inputs in groups of", lambda: kernels.pack_int4_(weight, packed[:, :, :8].contiguous())),
        ("int4 is int32", lambda: kernels.pack_int4_(weight, packed.long())),
        ("packed is [1, 64, 10] for a weight [2, 64, 64]", lambda: kernels.pack_int4_(weight, packed[:1])),
        ("no int4 of 96 inputs", lambda: kernels.unpack_int4(packed, 96)),
        ("w13 is Int but w2 is BFloat16", lambda: kernels.experts(x, packed, weight[:, :, :32].contiguous(), *choice)),
        ("no int4 of 64 inputs", lambda: kernels.experts(x, packed[:, :, :8].contiguous(), packed, *choice)),
        (
            "groups of another size",
            lambda: kernels.experts(x, torch.zeros(2, 128, 9, dtype=torch.int32), packed, *choice),
        ),
        (
            "with marks of coded bfloat16",
            lambda: kernels.experts(x, packed.repeat(1, 2, 1), packed, *choice, w13_marks=torch.zeros(4, 2)),
        ),
        ("int4 is int32", lambda: kernels.unpack_int4(packed.float(), 64)),
        ("use int32 [2, 16 / 8] or", lambda: kernels.widen_integers_(packed[0, :2, :3], one, one, plain)),
        (
            "8 groups of an even size",
            lambda: kernels.widen_integers_(packed[0, :2, :1], each, each, plain[0].view(2, 8)),
        ),
        (
            "lacks are Float[2, 1]; use float32 [2, 2]",
            lambda: kernels.widen_integers_(packed[0, :2, :2], one, two, plain),
        ),
        ("no int4 of 64 inputs", lambda: kernels.linear(x, packed[0, :, :8].contiguous())),
        ("int4 of 31 outputs; use a multiple of 32", lambda: kernels.linear(x, packed[0, :31])),
        ("int4 of 48 outputs; use a multiple of 32", lambda: kernels.gated(x, packed.view(-1, 10)[:96], 0, 32)),
    )
    yield from refusals("int4", refused)
