"""Runs every native kernel on random and awkward shapes under the instruction set of SGL_BATCH_ISA; prints a report.

A program, because the instruction set is chosen once per process.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator

import sgl_batch_kernel as kernels
import torch
import torch.nn.functional as F

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
DTYPES = (torch.float32, torch.bfloat16)

# tokens, hidden, intermediate, experts, choices
EXPERT_SHAPES = (
    (0, 64, 32, 4, 2),
    (1, 64, 32, 4, 2),
    (1, 1024, 384, 8, 8),
    (5, 100, 50, 6, 6),
    (37, 128, 96, 8, 3),
    (97, 32, 130, 5, 2),
    (200, 64, 64, 3, 1),
    (600, 64, 34, 60, 4),
)
ROUTINGS = ("random", "one expert takes all", "one expert has none", "some choices belong to nobody")
LINEAR_SHAPES = ((1, 1, 2), (1, 32, 64), (12, 33, 6), (13, 64, 100), (100, 257, 48), (300, 96, 128))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    if expected.numel() == 0:
        return 0.0 if found.shape == expected.shape else float("inf")
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    return float((found.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def draw_routing(name: str, tokens: int, experts: int, choices: int) -> torch.Tensor:
    ids = torch.stack([torch.randperm(experts)[:choices] for _ in range(tokens)]) if tokens else torch.empty(0, choices)
    ids = ids.to(torch.int32)
    if name == "one expert takes all":
        ids = torch.full_like(ids, -1)
        ids[:, 0] = experts - 1
    elif name == "one expert has none":
        ids[ids == 0] = -1
    elif name == "some choices belong to nobody" and tokens:
        ids[torch.rand(ids.shape) < 0.5] = -1
        ids[0] = -1
    return ids.contiguous()


def experts_in_float64(x, w13, w2, weights, ids) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(len(w13)):
        token, choice = torch.where(ids == expert)
        gate, up = (x[token].double() @ w13[expert].double().T).chunk(2, dim=-1)
        rows = (F.silu(gate) * up) @ w2[expert].double().T
        out.index_add_(0, token, rows * weights[token, choice, None].double())
    return out


def expert_cases() -> Iterator[tuple[str, bool]]:
    for dtype, shape, routing in itertools.product(DTYPES, EXPERT_SHAPES, ROUTINGS):
        tokens, hidden, inter, experts, choices = shape
        name = f"experts {dtype} {shape} {routing}"
        x = torch.randn(tokens, hidden).to(dtype)
        w13 = (torch.randn(experts, 2 * inter, hidden) / hidden**0.5).to(dtype)
        w2 = (torch.randn(experts, hidden, inter) / inter**0.5).to(dtype)
        weights, ids = torch.rand(tokens, choices), draw_routing(routing, tokens, experts, choices)
        expected = experts_in_float64(x, w13, w2, weights, ids)
        kernels.pack_(w13.view(2 * experts, inter, hidden))
        kernels.pack_(w2)
        out, rows = kernels.experts(x, w13, w2, weights, ids, f32_output=True)
        yield name, relative_error(out, expected) < TOLERANCE[dtype]
        yield name + ": rows", rows.tolist() == [int((ids == e).sum()) for e in range(experts)]
        rounded, _ = kernels.experts(x, w13, w2, weights, ids)
        yield name + ": rounded once", torch.equal(rounded, out.to(dtype))
        some = torch.randperm(tokens)[: tokens // 2 + 1]
        fewer, _ = kernels.experts(x[some], w13, w2, weights[some], ids[some], f32_output=True)
        yield name + ": a row's bits", torch.equal(fewer, out[some])
        yield from shard_cases(name, (x, w13, w2, weights, ids), out)


def shard_cases(name: str, given: tuple[torch.Tensor, ...], whole: torch.Tensor) -> Iterator[tuple[str, bool]]:
    """Experts on 2 or 4 ranks, their sums added up as a tree: the same bits as on one."""
    x, w13, w2, weights, ids = given
    for ranks in (2, 4):
        if len(w13) % ranks:
            continue
        size = len(w13) // ranks
        parts = []
        for rank in range(ranks):
            local = ids - rank * size
            local[(local < 0) | (local >= size)] = -1
            shard = slice(rank * size, (rank + 1) * size)
            parts.append(kernels.experts(x, w13[shard], w2[shard], weights, local, f32_output=True)[0])
        while len(parts) > 1:
            parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
        yield f"{name}: {ranks} ranks", torch.equal(parts[0], whole)


def linear_cases() -> Iterator[tuple[str, bool]]:
    for dtype, (rows, n, k), has_bias in itertools.product(DTYPES, LINEAR_SHAPES, (False, True)):
        name = f"linear {dtype} {rows}x{n}x{k} bias={has_bias}"
        x, weight = torch.randn(rows, k).to(dtype), (torch.randn(1, n, k) / k**0.5).to(dtype)
        bias = torch.randn(n).to(dtype) if has_bias else None
        expected = x.double() @ weight[0].double().T + (bias.double() if bias is not None else 0)
        plain = weight.clone()
        kernels.pack_(weight)
        out = kernels.linear(x, weight[0], bias)
        yield name, relative_error(out, expected) < TOLERANCE[dtype]
        one_by_one = torch.cat([kernels.linear(row[None].contiguous(), weight[0], bias) for row in x])
        yield name + ": a row's bits", torch.equal(one_by_one, out)
        kernels.unpack_(weight)
        yield name + ": unpacked", torch.equal(weight, plain)


def row_cases() -> Iterator[tuple[str, bool]]:
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


def attention_cases() -> Iterator[tuple[str, bool]]:
    shapes = (
        (64, 128, 16, 4),
        (64, 32, 2, 1),
        (16, 64, 4, 4),
        (64, 48, 6, 2),
        (8, 80, 26, 1),
        (32, 576, 4, 1),
        (2, 64, 2, 2),
    )
    cuts = (
        ([1], [1]),
        ([64, 65, 1, 130], [1, 1, 1, 1]),
        ([50, 33, 90, 64], [1, 33, 20, 64]),
        ([200], [150]),
    )
    for dtype, (page, dim, q_heads, kv_heads), (lengths, news) in itertools.product(DTYPES, shapes, cuts):
        name = f"attention {dtype} page {page} dim {dim} heads {q_heads}/{kv_heads} {lengths} {news}"
        given, k, v = attention_input(dtype, page, dim, (q_heads, kv_heads), lengths, news)
        out = kernels.attention(**given)
        expected = attention_in_float64(given["q_TD"], k, v, news, given["scaling"])
        yield name, relative_error(out, expected) < TOLERANCE[dtype]
        yield name + ": repeated", torch.equal(kernels.attention(**given), out)


def attention_input(dtype, page, dim, heads, lengths, news):
    """Sequences in scattered pages of a pool that holds large rubbish everywhere else."""
    q_heads, kv_heads = heads
    counts = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(counts) + 3)[: sum(counts)]
    starts = [0, *itertools.accumulate(counts)]
    k_plain = torch.full((sum(counts) + 3, kv_heads, page, dim), 1e6).to(dtype)
    v_plain = k_plain.clone()
    k = [torch.randn(length, kv_heads, dim).to(dtype) for length in lengths]
    v = [torch.randn(length, kv_heads, dim).to(dtype) for length in lengths]
    for i, length in enumerate(lengths):
        at = torch.arange(length)
        pages = order[starts[i] + at // page]
        k_plain[pages, :, at % page], v_plain[pages, :, at % page] = k[i], v[i]
    k_pages = k_plain.flatten(0, 1).contiguous()
    v_pages = v_plain.transpose(-1, -2).flatten(0, 1).contiguous()
    kernels.pack_(k_pages)
    kernels.pack_(v_pages)
    given = {
        "q_TD": torch.randn(sum(news), q_heads * dim).to(dtype),
        "k_pages": k_pages.view(-1, kv_heads, page * dim),
        "v_pages": v_pages.view(-1, kv_heads, page * dim),
        "starts": torch.tensor([0, *itertools.accumulate(news)]),
        "lengths": torch.tensor(lengths),
        "table_starts": torch.tensor(starts[:-1]),
        "tables": order,
        "page_size": page,
        "head_dim": dim,
        "scaling": dim**-0.5,
    }
    return given, k, v


def attention_in_float64(q, k, v, news, scaling) -> torch.Tensor:
    parts, row = [], 0
    for keys, values, new in zip(k, v, news, strict=True):
        dim, length = keys.shape[2], len(keys)
        queries = q[row : row + new].double().view(new, -1, dim)
        groups = queries.shape[1] // keys.shape[1]
        scores = torch.einsum("nhd,thd->hnt", queries, keys.double().repeat_interleave(groups, 1)) * scaling
        hidden = torch.arange(length) > torch.arange(length - new, length)[:, None]
        shares = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        parts.append(torch.einsum("hnt,thd->nhd", shares, values.double().repeat_interleave(groups, 1)).flatten(1))
        row += new
    return torch.cat(parts)


def main() -> None:
    torch.manual_seed(0)
    checked, failures = 0, []
    for name, holds in itertools.chain(expert_cases(), linear_cases(), row_cases(), attention_cases()):
        checked += 1
        if not holds:
            failures.append(name)
    json.dump({"isa": kernels.isa(), "checked": checked, "failures": failures}, sys.stdout)


if __name__ == "__main__":
    main()
