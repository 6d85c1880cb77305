"""Owns the measured products: the machine's ceilings, linear layers, and experts by tokens per expert."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from runners.cpu_rates import large_reads

from kernel_rates.memory_probe import line_exchange
from kernel_rates.shapes import Shapes
from kernel_rates.work import Work
from sgl_batch.layers.moe.cpu_experts import combined_experts
from sgl_batch.layers.small_weights import int8_room
from sgl_batch.memory.huge_pages import prefer_huge_pages

PRODUCT, READ = "product", "read"
# Weights and rows rounded to int8.
INT8 = "int8 by int8"
# bf16 weights in 12 bits, without loss.
LOSSLESS12 = "12 bits"
_SIDE = 4096
_READ_BYTES = 1 << 30


def ceilings(kernels: Any) -> Iterator[Work]:
    """Return a large product of bf16 and a large read, each in several ways, of which the fastest counts.

    And what two cores take to hand a line to each other.
    """
    x, weight = torch.randn(_SIDE, _SIDE).bfloat16(), torch.randn(_SIDE, _SIDE).bfloat16()
    ours, theirs = weight.clone(), torch.ops.mkldnn._reorder_linear_weight(weight, _SIDE)
    kernels.pack_(ours[None])
    wide, wide_weight = x.float(), weight.float()
    ways: dict[str, Callable[[], object]] = {
        "sgl_batch": lambda: kernels.linear(x, ours),
        "oneDNN, packed": lambda: torch.ops.mkldnn._linear_pointwise(x, theirs, None, "none", [], ""),
        "torch, F.linear": lambda: F.linear(x, weight),
        "torch, F.linear of float32": lambda: F.linear(wide, wide_weight),
    }
    for by, run in ways.items():
        row = f"bf16 product of {_SIDE} x {_SIDE} x {_SIDE}"
        yield Work(table=PRODUCT, row=row, by=by, flops=2 * _SIDE**3, num_bytes=6 * _SIDE**2, run=run)
    for by, run in large_reads(_READ_BYTES).items():
        row = f"read of {_READ_BYTES >> 20} MiB"
        yield Work(table=READ, row=row, by=by, flops=0, num_bytes=_READ_BYTES, run=run)
    yield from line_exchange()


def _weight(values: torch.Tensor) -> torch.Tensor:
    """Return the values as bf16 where a model's weights lie: on huge pages if the operating system grants them."""
    weight = torch.empty(values.shape, dtype=torch.bfloat16)
    prefer_huge_pages(weight)
    return weight.copy_(values)


def linear_work(kernels: Any, shapes: Shapes, rows: list[int]) -> Iterator[Work]:
    """Return the linear layers of a model by number of rows, compared with F.linear. Weights are not in caches."""
    sizes = {
        "qkv": ((shapes.q_heads + 2 * shapes.kv_heads) * shapes.head_dim, shapes.hidden),
        "o": (shapes.hidden, shapes.q_heads * shapes.head_dim),
        "lm_head": (shapes.vocabulary, shapes.hidden),
    }
    for name, (n, k) in sizes.items():
        copies = max(1, (256 << 20) // (2 * n * k))
        plain = [_weight(torch.randn(n, k)) for _ in range(copies)]
        packed = [_weight(weight) for weight in plain]
        for weight in packed:
            kernels.pack_(weight[None])
        for count in rows:
            x = torch.randn(count, k).bfloat16()
            about = {"table": f"linear {name} {n} x {k}", "row": f"{count} rows"}
            size = {"flops": 2 * count * n * k, "num_bytes": 2 * (n * k + count * (n + k))}
            for by, product, weights in (("sgl_batch", kernels.linear, packed), ("F.linear", F.linear, plain)):
                yield Work(**about, **size, by=by, run=_each_in_turn(product, x, itertools.cycle(weights)))
        if name != "lm_head":
            yield from _int8_linear_work(kernels, f"linear {name} {n} x {k}", plain, rows)


def _int8_linear_work(kernels: Any, table: str, plain: list[torch.Tensor], rows: list[int]) -> Iterator[Work]:
    """Return the same layers in int8; the output projection stays as it is."""
    rounded = [_rounded(kernels, weight[None]) for weight in plain]
    for weight, _ in rounded:
        kernels.pack_quads_(weight)
    n, k = plain[0].shape

    def product(x: torch.Tensor, weight: tuple[torch.Tensor, torch.Tensor]) -> object:
        return kernels.linear_int8(x, weight[0][0], scales=weight[1])

    for count in rows:
        x = torch.randn(count, k).bfloat16()
        size = {"flops": 2 * count * n * k, "num_bytes": n * k + 2 * count * (n + k)}
        run = _each_in_turn(product, x, itertools.cycle(rounded))
        yield Work(table=table, row=f"{count} rows", by=INT8, **size, run=run)


def _each_in_turn(product: Callable[..., object], x: torch.Tensor, weights: Iterator[Any]) -> Callable[[], object]:
    return lambda: product(x, next(weights))


def balanced_routing(tokens: int, shapes: Shapes) -> tuple[torch.Tensor, torch.Tensor]:
    """Make weights and ids [tokens, top_k] that give every expert the same number of rows, in random order."""
    first = torch.arange(tokens)[:, None] * shapes.top_k
    ids = (first + torch.arange(shapes.top_k)) % shapes.experts
    return torch.rand(tokens, shapes.top_k), ids[torch.randperm(tokens)].to(torch.int32)


def grouped_mm_experts(
    x_TM: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights_TK: torch.Tensor, ids_TK: torch.Tensor
) -> torch.Tensor:
    """Compute the experts of a layer by torch's grouped_mm, rows sorted by expert."""
    flat = ids_TK.reshape(-1)
    order = torch.argsort(flat, stable=True)
    ends = torch.cumsum(torch.bincount(flat, minlength=len(w13)), 0).to(torch.int32)
    gate, up = F.grouped_mm(x_TM[order // ids_TK.shape[1]], w13.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    rows = F.grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), offs=ends)
    rows *= weights_TK.reshape(-1)[order, None].to(rows.dtype)
    by_choice = torch.empty_like(rows)
    by_choice[order] = rows
    return by_choice.view(*ids_TK.shape, -1).sum(1)


def expert_work(kernels: Any, shapes: Shapes, tokens_per_expert: list[int], layers: int) -> Iterator[Work]:
    """Return one layer's experts over a combined batch and torch's ways; each call takes the next layer's weights."""
    e, i, m = shapes.experts, shapes.inter, shapes.hidden
    plain = [
        (_weight(torch.randn(e, 2 * i, m) / m**0.5), _weight(torch.randn(e, m, i) / i**0.5)) for _ in range(layers)
    ]
    packed = [(_weight(w13), _weight(w2)) for w13, w2 in plain]
    coded = [_coded(kernels, _weight(w13), _weight(w2)) for w13, w2 in plain]
    for w13, w2 in packed:
        kernels.pack_(w13.view(2 * e, i, m))
        kernels.pack_(w2)
    rounded = [(*_in_quads(kernels, w13, 2), *_in_quads(kernels, w2, 1)) for w13, w2 in plain]
    ways: dict[str, tuple[Callable[..., object], Sequence[tuple[torch.Tensor, ...]], float]] = {
        "sgl_batch": (kernels.experts, packed, 2),
        LOSSLESS12: (partial(_coded_experts, kernels), coded, 1.5),
        INT8: (partial(_int8_experts, kernels), rounded, 1),
        "grouped_mm": (grouped_mm_experts, plain, 2),
        "F.linear": (combined_experts, plain, 2),
    }
    for count in tokens_per_expert:
        tokens = count * e // shapes.top_k
        x = torch.randn(tokens, m).bfloat16()
        routing = balanced_routing(tokens, shapes)
        flops = 2 * count * e * shapes.expert_elements
        for by, (compute, weights, weight_bytes) in ways.items():
            num_bytes = int(weight_bytes * e * shapes.expert_elements) + 4 * tokens * m
            run = _layer_in_turn(compute, x, itertools.cycle(weights), routing)
            yield Work(table="experts", row=f"{count}", by=by, flops=flops, num_bytes=num_bytes, run=run)


def _coded(kernels: Any, w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Pack and code weights of experts in place, and return them with their marks."""
    experts, inter = len(w13), w2.shape[2]
    return w13, w2, kernels.pack_coded_(w13.view(2 * experts, inter, -1)), kernels.pack_coded_(w2)


def _coded_experts(
    kernels: Any,
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_marks: torch.Tensor,
    w2_marks: torch.Tensor,
    *routing: torch.Tensor,
) -> object:
    return kernels.experts(x, w13, w2, *routing, w13_marks=w13_marks, w2_marks=w2_marks)


def _rounded(kernels: Any, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights [B, N, K] in int8, and their scales."""
    rounded, scales = int8_room(weight.shape)
    kernels.round_to_int8_(weight, rounded, scales)
    return rounded, scales


def _in_quads(kernels: Any, weight: torch.Tensor, halves: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights of experts in int8, packed, each half of the outputs by itself, and their scales."""
    rounded, scales = _rounded(kernels, weight)
    kernels.pack_quads_(rounded.view(halves * len(weight), -1, weight.shape[2]))
    return rounded, scales


def _int8_experts(
    kernels: Any,
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scales: torch.Tensor,
    w2: torch.Tensor,
    w2_scales: torch.Tensor,
    *routing: torch.Tensor,
) -> object:
    return kernels.experts_int8(x, w13, w2, *routing, w13_scales=w13_scales, w2_scales=w2_scales)


def _layer_in_turn(
    compute: Callable[..., object],
    x: torch.Tensor,
    layers: Iterator[tuple[torch.Tensor, ...]],
    routing: tuple[torch.Tensor, torch.Tensor],
) -> Callable[[], object]:
    return lambda: compute(x, *next(layers), *routing)
