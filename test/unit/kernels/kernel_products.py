"""Experts and linear layers of the native kernels against float64, for weights of every number type."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import sgl_batch_kernel as kernels
import torch
import torch.nn.functional as F
from kernel_checks import DTYPES, TOLERANCE, Check, relative_error, same_on_any_threads

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
    (1500, 32, 34, 16, 4),
    (4096, 64, 32, 8, 2),
)
ROUTINGS = ("random", "one expert takes all", "one expert has none", "some choices are absent")
LINEAR_SHAPES = ((1, 1, 2), (1, 32, 64), (12, 33, 6), (13, 64, 100), (100, 257, 48), (300, 96, 128), (4096, 40, 32))
# rows, intermediate, hidden
GATED_SHAPES = ((0, 64, 32), (1, 384, 1024), (13, 50, 100), (300, 130, 34))
# Rows of whole multiples of 4 KiB, which are copied further apart, a tile's and several blocks of them.
LONG_ROWS = (13, 300)
LONG_INPUTS = 2048
# number types of rows and weights; int8 has scales
KINDS = (*((dtype, dtype) for dtype in DTYPES), (torch.bfloat16, torch.int8), (torch.float32, torch.int8))


def draw_routing(name: str, tokens: int, experts: int, choices: int) -> torch.Tensor:
    ids = torch.stack([torch.randperm(experts)[:choices] for _ in range(tokens)]) if tokens else torch.empty(0, choices)
    ids = ids.to(torch.int32)
    if name == "one expert takes all":
        ids = torch.full_like(ids, -1)
        ids[:, 0] = experts - 1
    elif name == "one expert has none":
        ids[ids == 0] = -1
    elif name == "some choices are absent" and tokens:
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


class Weight:
    """A plain weight [B, N, K] in float64 as the kernels see it, and packed, with scales where it is of int8."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype, *, halves: int = 1) -> None:
        self.scales = None
        stored = weight.to(dtype) if dtype != torch.int8 else torch.empty_like(weight, dtype=dtype)
        self.exact = stored.double()
        if dtype == torch.int8:
            self.scales = torch.rand(weight.shape[:2]) + 0.01
            stored.random_(-127, 128)
            self.exact = stored.double() * self.scales[..., None].double() / 100
            self.scales /= 100
        self.packed = stored
        self.plain = stored.clone()
        batch, n, k = weight.shape
        self._matrices = stored.view(batch * halves, n // halves, k)
        kernels.pack_(self._matrices)

    def unpacks(self) -> bool:
        kernels.unpack_(self._matrices)
        same = torch.equal(self.packed, self.plain)
        kernels.pack_(self._matrices)
        return same


def tolerance(x_dtype: torch.dtype, w_dtype: torch.dtype) -> float:
    """Rows of float32 meet weights of int8 as bf16 where the instruction set wants pairs."""
    return TOLERANCE[torch.bfloat16] if w_dtype != torch.float32 else TOLERANCE[x_dtype]


def expert_cases() -> Iterator[Check]:
    """Every number type with every shape, and the routings by turns: each meets every number type and every shape."""
    for kind, shape in itertools.product(range(len(KINDS)), range(len(EXPERT_SHAPES))):
        yield from expert_case(KINDS[kind], EXPERT_SHAPES[shape], ROUTINGS[(kind + shape) % len(ROUTINGS)])


def expert_case(
    dtypes: tuple[torch.dtype, torch.dtype], shape: tuple[int, int, int, int, int], routing: str
) -> Iterator[Check]:
    x_dtype, w_dtype = dtypes
    tokens, hidden, inter, experts, choices = shape
    name = f"experts {x_dtype} {w_dtype} {shape} {routing}"
    x = torch.randn(tokens, hidden).to(x_dtype)
    w13 = Weight(torch.randn(experts, 2 * inter, hidden) / hidden**0.5, w_dtype, halves=2)
    w2 = Weight(torch.randn(experts, hidden, inter) / inter**0.5, w_dtype)
    weights, ids = torch.rand(tokens, choices), draw_routing(routing, tokens, experts, choices)
    scales = {"w13_scales": w13.scales, "w2_scales": w2.scales}

    def run(chosen: torch.Tensor, **options: bool) -> torch.Tensor:
        return kernels.experts(
            x[chosen],
            w13.packed,
            w2.packed,
            weights[chosen],
            ids[chosen],
            **scales,
            **options,
        )[0]

    everything = torch.arange(tokens)
    out, rows = kernels.experts(x, w13.packed, w2.packed, weights, ids, f32_output=True, **scales)
    expected = experts_in_float64(x, w13.exact, w2.exact, weights, ids)
    yield name, relative_error(out, expected) < tolerance(x_dtype, w_dtype)
    yield name + ": rows", rows.tolist() == [int((ids == e).sum()) for e in range(experts)]
    yield name + ": rounded once", torch.equal(run(everything), out.to(x_dtype))
    some = torch.randperm(tokens)[: tokens // 2 + 1]
    yield name + ": a row's bits", torch.equal(run(some, f32_output=True), out[some])
    yield name + ": threads", same_on_any_threads(lambda: run(everything))
    if w_dtype != torch.int8:
        yield from shard_cases(name, (x, w13.packed, w2.packed, weights, ids), out)


def shard_cases(name: str, given: tuple[torch.Tensor, ...], whole: torch.Tensor) -> Iterator[Check]:
    x, w13, w2, weights, ids = given

    def on_shard(shard: slice, local: torch.Tensor) -> torch.Tensor:
        return kernels.experts(x, w13[shard], w2[shard], weights, local, f32_output=True)[0]

    yield from shard_parts(name, ids, len(w13), whole, on_shard)


def shard_parts(
    name: str,
    ids: torch.Tensor,
    experts: int,
    whole: torch.Tensor,
    on_shard: Callable[[slice, torch.Tensor], torch.Tensor],
) -> Iterator[Check]:
    """Experts on 2 or 4 ranks, their sums added up as a tree: the same bits as on one."""
    for ranks in (2, 4):
        if experts % ranks:
            continue
        size = experts // ranks
        parts = []
        for rank in range(ranks):
            local = ids - rank * size
            local[(local < 0) | (local >= size)] = -1
            parts.append(on_shard(slice(rank * size, (rank + 1) * size), local))
        while len(parts) > 1:
            parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
        yield f"{name}: {ranks} ranks", torch.equal(parts[0], whole)


def long_row_cases() -> Iterator[Check]:
    for dtypes, rows in itertools.product(KINDS, LONG_ROWS):
        yield from expert_case(dtypes, (rows, LONG_INPUTS, 34, 4, 2), ROUTINGS[0])
        yield from expert_case(dtypes, (rows, 34, LONG_INPUTS, 4, 2), ROUTINGS[0])
        yield from linear_case(dtypes, (rows, 33, LONG_INPUTS), False)
        yield from gated_case(dtypes, rows, 34, LONG_INPUTS)


def linear_cases() -> Iterator[Check]:
    for case in itertools.product(KINDS, LINEAR_SHAPES, (False, True)):
        yield from linear_case(*case)


def linear_case(
    dtypes: tuple[torch.dtype, torch.dtype], shape: tuple[int, int, int], has_bias: bool
) -> Iterator[Check]:
    (x_dtype, w_dtype), (rows, n, k) = dtypes, shape
    name = f"linear {x_dtype} {w_dtype} {rows}x{n}x{k} bias={has_bias}"
    x, weight = torch.randn(rows, k).to(x_dtype), Weight(torch.randn(1, n, k) / k**0.5, w_dtype)
    bias = torch.randn(n).to(x_dtype) if has_bias else None
    expected = x.double() @ weight.exact[0].T + (bias.double() if bias is not None else 0)

    def run(given: torch.Tensor) -> torch.Tensor:
        return kernels.linear(given, weight.packed[0], bias, scales=weight.scales)

    out = run(x)
    yield name, relative_error(out, expected) < tolerance(x_dtype, w_dtype)
    one_by_one = torch.cat([run(row[None].contiguous()) for row in x[:300]])
    yield name + ": a row's bits", torch.equal(one_by_one, out[:300])
    yield name + ": threads", same_on_any_threads(lambda: run(x))
    yield name + ": unpacked", weight.unpacks()


def gated_cases() -> Iterator[Check]:
    for dtypes, (rows, inter, hidden) in itertools.product(KINDS, GATED_SHAPES):
        yield from gated_case(dtypes, rows, inter, hidden)


def gated_case(dtypes: tuple[torch.dtype, torch.dtype], rows: int, inter: int, hidden: int) -> Iterator[Check]:
    x_dtype, w_dtype = dtypes
    name = f"gated {x_dtype} {w_dtype} {rows}x{inter}x{hidden}"
    x = torch.randn(rows, hidden).to(x_dtype)
    w13 = Weight(torch.randn(1, 2 * inter, hidden) / hidden**0.5, w_dtype, halves=2)
    w2 = Weight(torch.randn(1, hidden, inter) / inter**0.5, w_dtype)

    def run(first: int, last: int) -> torch.Tensor:
        return kernels.gated(x, w13.packed[0], first, last, scales=w13.scales)

    one = torch.ones(rows, 1), torch.zeros(rows, 1, dtype=torch.int32)
    scales = {"w13_scales": w13.scales, "w2_scales": w2.scales}
    expected, _ = kernels.experts(x, w13.packed, w2.packed, *one, **scales)
    whole = run(0, inter)
    exact = whole.to(torch.promote_types(whole.dtype, x_dtype))
    found = kernels.linear(exact, w2.packed[0], scales=w2.scales).to(x_dtype)
    yield name + ": an expert's bits", torch.equal(found, expected)
    ends = [*range(0, inter, kernels.PANEL), inter]
    parts = [run(first, last) for first, last in itertools.pairwise(ends)]
    yield name + ": in parts", torch.equal(torch.cat(parts, 1), whole)
    yield name + ": no channels", run(0, 0).shape == (rows, 0)
    yield name + ": threads", same_on_any_threads(lambda: run(0, inter))
