"""Runs every native kernel on random and awkward shapes under the instruction set of SGL_BATCH_ISA; prints a report.

A program, because the instruction set is chosen once per process. Memory that torch hands out is full of NaN, so that
an output which is not written in full shows.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator

import sgl_batch_kernel as kernels
import torch
from kernel_attention import attention_cases
from kernel_checks import DTYPES, TOLERANCE, Check, relative_error
from kernel_choices import choice_cases
from kernel_coded import coded_cases
from kernel_few_rows import few_row_cases
from kernel_fp4 import fp4_cases
from kernel_fp8 import fp8_cases
from kernel_int4 import int4_cases
from kernel_int8 import int8_cases, int8_long_row_cases
from kernel_int8_groups import int8_groups_cases
from kernel_latent import latent_cases
from kernel_pages import page_cases
from kernel_products import expert_cases, gated_cases, linear_cases, long_row_cases


def row_cases() -> Iterator[Check]:
    for dtype, width, has_residual in itertools.product(DTYPES, (2, 16, 130, 1024), (False, True)):
        wide = torch.randn(37, 2 * width).to(dtype)
        x, weight = wide[:, :width], torch.randn(width).to(dtype)
        residual = torch.randn(37, width).to(dtype) if has_residual else None
        out, summed = kernels.rms_norm(x, residual, weight, 1e-6)
        h = x.double() + (residual.double() if residual is not None else 0)
        expected = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
        name = f"rms_norm {dtype} {width} residual={has_residual}"
        yield name, relative_error(out, expected) < TOLERANCE[dtype]
        yield name + ": sum", (summed is None) if residual is None else relative_error(summed, h) < TOLERANCE[dtype]
        if residual is not None:
            rows = x.contiguous()
            kernels.add_rms_norm_(rows, residual, weight, 1e-6)
            yield name + ": in place", torch.equal(rows, out) and torch.equal(residual, summed)
    for dtype, neox, rotary_dim in itertools.product(DTYPES, (False, True), (16, 64)):
        wide = torch.randn(9, 300).to(dtype)
        before, positions = wide.clone(), torch.randint(0, 50, (9,))
        angles = torch.randn(50, rotary_dim).to(dtype)
        kernels.rotary(wide[:, 50:178], positions, angles, head_dim=64, neox=neox)
        heads = before[:, 50:178].double().view(9, 2, 64)
        cosine, sine = (part[:, None] for part in angles[positions].double().chunk(2, dim=-1))
        turned = heads[..., :rotary_dim]
        a, b = turned.chunk(2, dim=-1) if neox else (turned[..., ::2], turned[..., 1::2])
        pair = (a * cosine - b * sine, b * cosine + a * sine)
        rotated = torch.cat(pair, dim=-1) if neox else torch.stack(pair, dim=-1).flatten(-2)
        expected = before.double()
        expected[:, 50:178] = torch.cat((rotated, heads[..., rotary_dim:]), dim=-1).flatten(1)
        yield f"rotary {dtype} {neox} {rotary_dim}", relative_error(wide, expected) < TOLERANCE[dtype]
    for dtype, neox, (q_heads, k_heads), (head_dim, rotary_dim) in itertools.product(
        DTYPES, (False, True), ((3, 2), (1, 1)), ((48, 32), (64, 32), (64, 64), (128, 128))
    ):
        both = (q_heads + k_heads) * head_dim
        wide, positions = torch.randn(7, both + 50).to(dtype), torch.randint(0, 50, (7,))
        angles, q_weight, k_weight = (
            torch.randn(50, rotary_dim),
            torch.randn(head_dim).to(dtype),
            torch.randn(head_dim).to(dtype),
        )
        expected = wide.clone()
        for weight, part in ((q_weight, slice(0, q_heads * head_dim)), (k_weight, slice(q_heads * head_dim, both))):
            heads, _ = kernels.rms_norm(wide[:, part].reshape(-1, head_dim), None, weight, 1e-6)
            expected[:, part] = heads.view(7, -1)
            kernels.rotary(expected[:, part], positions, angles, head_dim=head_dim, neox=neox)
        kernels.qk_norm_rope(
            wide, q_weight, k_weight, 1e-6, positions, angles, q_heads=q_heads, k_heads=k_heads, neox=neox
        )
        yield f"qk_norm_rope {dtype} {neox} {q_heads} {k_heads} {head_dim} {rotary_dim}", torch.equal(wide, expected)


def main() -> None:
    torch.manual_seed(0)
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms imports a compiler
    torch.utils.deterministic.fill_uninitialized_memory = True
    checked, failures = 0, []
    cases = (
        expert_cases(),
        linear_cases(),
        gated_cases(),
        int8_cases(),
        row_cases(),
        attention_cases(),
        choice_cases(),
        page_cases(),
        latent_cases(),
        coded_cases(),
        fp4_cases(),
        int4_cases(),
        fp8_cases(),
        int8_groups_cases(),
        few_row_cases(),
        long_row_cases(),
        int8_long_row_cases(),
    )
    for name, holds in itertools.chain.from_iterable(cases):
        checked += 1
        if not holds:
            failures.append(name)
    json.dump({"isa": kernels.isa(), "checked": checked, "failures": failures}, sys.stdout)


if __name__ == "__main__":
    main()
