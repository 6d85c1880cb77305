"""Many experts of few rows each: a thread goes through all of an expert, and a token has the bits that it has alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import kernel_fp8
import kernel_int8_groups
import sgl_batch_kernel as kernels
import torch
from kernel_checks import Check
from kernel_coded import CodedWeight
from kernel_grouped import Form, GroupedWeight
from kernel_int8 import QuadWeight
from kernel_products import Weight

# A token alone has fewer experts than a thread must have to go through each as a whole.
EXPERTS, TOP_K, TOKENS = 60, 4, 50
# Hidden and intermediate, with whole panels and groups, and with narrow panels.
WHOLE, NARROW = (96, 160), (100, 50)

Run = Callable[..., torch.Tensor]


def few_row_cases() -> Iterator[Check]:
    for dtype, weight_dtype in (
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.int8),
    ):
        for sizes in (WHOLE, NARROW):
            yield from case(f"{weight_dtype} {sizes}", sizes, dtype, *of_plain(sizes, weight_dtype))
    for sizes in (WHOLE, NARROW):
        yield from case(f"12 bits {sizes}", sizes, torch.bfloat16, *of_codes(sizes))
        yield from case(f"int8 by int8 {sizes}", sizes, torch.bfloat16, *of_quads(sizes))
    forms: tuple[tuple[str, Form, Callable[..., torch.Tensor]], ...] = (
        ("fp8", kernel_fp8.form_of(32), partial(kernel_fp8.by_rows, 32)),
        ("int8 in groups", kernel_int8_groups.form_of(32), partial(kernel_int8_groups.by_rows, 32, torch.float32)),
    )
    for name, form, draw in forms:
        w13, w2 = (GroupedWeight(form, draw(*shape), halves=halves).small for shape, halves in shapes(WHOLE))
        yield from case(f"{name} {WHOLE}", WHOLE, torch.bfloat16, kernels.experts, (w13, w2), {})


def shapes(sizes: tuple[int, int]) -> tuple[tuple[tuple[int, int, int], int], tuple[tuple[int, int, int], int]]:
    hidden, inter = sizes
    return ((EXPERTS, 2 * inter, hidden), 2), ((EXPERTS, hidden, inter), 1)


Packed = tuple[Run, tuple[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]


def of_plain(sizes: tuple[int, int], dtype: torch.dtype) -> Packed:
    w13, w2 = (Weight(torch.randn(shape) / 8, dtype, halves=halves) for shape, halves in shapes(sizes))
    scales = {} if w13.scales is None else {"w13_scales": w13.scales, "w2_scales": w2.scales}
    return kernels.experts, (w13.packed, w2.packed), scales


def of_codes(sizes: tuple[int, int]) -> Packed:
    w13, w2 = (CodedWeight(torch.randn(shape).bfloat16() / 8, halves=halves) for shape, halves in shapes(sizes))
    return kernels.experts, (w13.coded, w2.coded), {"w13_marks": w13.marks.view(2 * EXPERTS, -1), "w2_marks": w2.marks}


def of_quads(sizes: tuple[int, int]) -> Packed:
    w13, w2 = (QuadWeight(*shape, halves=halves) for shape, halves in shapes(sizes))
    return kernels.experts_int8, (w13.packed, w2.packed), {"w13_scales": w13.scales, "w2_scales": w2.scales}


def case(
    name: str,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    run: Run,
    packed: tuple[torch.Tensor, torch.Tensor],
    more: dict[str, torch.Tensor],
) -> Iterator[Check]:
    hidden, inter = sizes
    x, weights = torch.randn(TOKENS, hidden).to(dtype), torch.rand(TOKENS, TOP_K)
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).int()
    ids[:30, 0] = 7  # so many rows that they take several tiles
    ids[:30, 1:][ids[:30, 1:] == 7] = 8
    ids[3], ids[5, 1:] = -1, -1
    clamped = {
        "w13_bias": torch.randn(EXPERTS, 2 * inter),
        "w2_bias": torch.randn(EXPERTS, hidden),
        "alpha": 1.7,
        "limit": 7.0,
    }
    for options in ({}, {"f32_output": True, **clamped}):
        together, rows = run(x, *packed, weights, ids, **more, **options)
        alone = [
            run(x[t : t + 1], *packed, weights[t : t + 1], ids[t : t + 1], **more, **options)[0] for t in range(TOKENS)
        ]
        yield f"few rows, {name}, {sorted(options)}: as alone", torch.equal(together, torch.cat(alone))
        yield f"few rows, {name}, {sorted(options)}: no outputs without choices", not together[3].any()
        yield f"few rows, {name}: rows are counted", torch.equal(rows, torch.bincount(ids[ids >= 0], minlength=EXPERTS))
