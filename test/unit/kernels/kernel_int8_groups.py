"""Weights that are integers of 8 bits times scales of groups: they stay so small, and products have bfloat16's bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import sgl_batch_kernel as kernels
import torch
from kernel_checks import Check, refusals
from kernel_grouped import Form, GroupedWeight, expert_cases
from kernel_int4 import of_integers

# Hidden and intermediate, by how many numbers have one scale.
SIZES = {32: ((96, 160), (2080, 32)), 128: ((384, 128), (128, 256))}
# Far beyond those of checkpoints.
LEAST_SCALE, MOST_SCALE = 2.0**-100, 2.0**92


def form_of(group: int) -> Form:
    def room(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(*shape[:-1], shape[-1] // 2 + 2 * shape[-1] // group, dtype=torch.int16)

    return Form(room, kernels.pack_int8_groups_, kernels.unpack_int8_groups)


def by_rows(group: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Every output has a scale, and the largest number of a group is any multiple of it."""
    drawn = torch.randn(shape)
    scales = drawn.abs().amax(-1, keepdim=True).div(127).to(dtype).float()
    integers = (drawn / scales).round().clamp(-128, 127)
    return of_integers(integers, scales.expand(*shape[:-1], shape[-1] // group))


def by_groups(group: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Every group has a scale."""
    scales = torch.rand(*shape[:-1], shape[-1] // group) * 0.01 + 1e-3
    return of_integers(torch.randint(-128, 128, shape), scales.to(dtype))


def of_few(group: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Groups of zeros, of one number, of two, and of such as have several scales."""
    groups = (*shape[:-1], shape[-1] // group)
    draws = torch.tensor([[0, 0], [77, 77], [-128, 127], [-64, 0], [64, -64], [100, -1], [96, 64], [-128, -126]])
    kinds = torch.randint(0, len(draws), groups).repeat_interleave(group, dim=-1)
    return of_integers(draws[kinds, torch.randint(0, 2, shape)], (torch.rand(groups) + 0.5).to(dtype))


def int8_groups_cases() -> Iterator[Check]:
    for group, all_sizes in SIZES.items():
        for sizes in all_sizes:
            for draw, dtype in ((by_rows, torch.bfloat16), (by_groups, torch.float32), (of_few, torch.float16)):
                name = f"int8 by {group} experts {sizes[0]}x{sizes[1]} {draw.__name__} {dtype}"
                numbers = partial(draw, group, dtype)
                yield from expert_cases(name, form_of(group), sizes, numbers, signs_of_zeros=False)
        yield from numbers_of_all_scales(group)
        yield from numbers_that_are_none(group)
    yield from refused_cases()


def numbers_of_all_scales(group: int) -> Iterator[Check]:
    """Scales of all fractions that bfloat16 has, and of some of float32, with all magnitudes up to each largest one.

    Many products lie halfway between numbers of bfloat16, and many groups have large numbers alone.
    """
    form = form_of(group)
    scales = torch.cat((torch.arange(128, 256) * 2.0**-16, torch.rand(896) * 2.0**-9 + 2.0**-9)).view(1, 1024, 1)
    for largest in (127, 126, 100, 65, 64, 63, 33, 2, 1):
        for least in (0, max(0, largest - 31), largest // 2):
            integers = (torch.arange(group) % (largest - least + 1) + least).flip(0)
            integers = (integers * torch.where(torch.arange(group) % 3 == 0, -1, 1)).expand(1, 1024, group)
            weight = GroupedWeight(form, of_integers(integers, scales))
            yield f"int8 by {group}: from {least} to {largest}", weight.loses_nothing(signs_of_zeros=False)
    for scale in (LEAST_SCALE, MOST_SCALE):
        weight = GroupedWeight(
            form, of_integers((torch.arange(group) - 128).expand(1, 32, group), torch.full((1, 32, 1), scale))
        )
        yield f"int8 by {group}: scale {scale}", weight.loses_nothing(signs_of_zeros=False)


def numbers_that_are_none(group: int) -> Iterator[Check]:
    form = form_of(group)
    for changed in (128.0, 129.0, 0.5, 3.03125, 20.25, 1e-40, float("inf"), float("nan")):
        weight = (torch.arange(2 * group) % 256 - 128).bfloat16().expand(2, 64, 2 * group).clone()
        weight[..., group] = 127
        weight[..., -2] = -1
        weight[1, 63, -1] = changed
        yield f"int8 by {group}: {changed} beside integers is none", not GroupedWeight(form, weight).fits
    two = torch.cat((torch.full((1, 32, group // 2), 1.0), torch.full((1, 32, group // 2), 1.3)), dim=-1)
    some = torch.arange(group) % 16 + 1
    yield f"int8 by {group}: two scales are none", not GroupedWeight(form, (two * some).bfloat16()).fits
    yield (
        f"int8 by {group}: numbers at random are none",
        not GroupedWeight(form, torch.randn(1, 32, group).bfloat16()).fits,
    )


def refused_cases() -> Iterator[Check]:
    x, choice = torch.zeros(1, 64).bfloat16(), (torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32))
    weight, packed = torch.zeros(2, 64, 64, dtype=torch.bfloat16), torch.zeros(2, 64, 36, dtype=torch.int16)
    by_128 = torch.zeros(2, 128, 66, dtype=torch.int16)
    refused: tuple[tuple[str, Callable[[], object]], ...] = (
        ("int8 in groups takes bfloat16 of multiples of", lambda: kernels.pack_int8_groups_(weight.float(), packed)),
        (
            "no int8 of 64 inputs in groups of",
            lambda: kernels.pack_int8_groups_(weight, packed[:, :, :33].contiguous()),
        ),
        ("int8 in groups is int16", lambda: kernels.pack_int8_groups_(weight, packed.int())),
        ("no int8 of 96 inputs", lambda: kernels.unpack_int8_groups(packed, 96)),
        (
            "w13 is Short but w2 is BFloat16",
            lambda: kernels.experts(x, packed, weight[:, :, :32].contiguous(), *choice),
        ),
        (
            "groups of another size",
            lambda: kernels.experts(torch.zeros(1, 128), by_128, packed[:, :, :18].repeat(1, 2, 2), *choice),
        ),
        ("no int8 of 64 inputs", lambda: kernels.linear(x, packed[0, :, :33].contiguous())),
        ("int8 in groups of 31 outputs; use a multiple of 32", lambda: kernels.linear(x, packed[0, :31])),
        (
            "int8 in groups of 48 outputs; use a multiple of 32",
            lambda: kernels.gated(x, packed.view(-1, 36)[:96], 0, 32),
        ),
    )
    yield from refusals("int8 in groups", refused)
