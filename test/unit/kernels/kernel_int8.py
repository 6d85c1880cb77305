"""The native products of int8 with int8: linear ones bit by bit, experts up to the activation between them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import int8_reference
import sgl_batch_kernel as kernels
import torch
from kernel_checks import DTYPES, Check, relative_error, same_on_any_threads
from kernel_products import EXPERT_SHAPES, ROUTINGS, draw_routing, shard_parts

INPUTS = (1, 2, 3, 4, 5, 63, 64, 66, 130, 1024)
OUTPUTS = (1, 31, 32, 33, 70)
ROWS = (0, 1, 2, 3, 11, 12, 13, 16, 17, 31, 32, 33, 40, 200)
# The most inputs, whose sums reach the ends of int32.
MOST_INPUTS = 132_103
# What lies between the products is a few units of the last place off, so that a number now and then rounds otherwise.
EXPERT_TOLERANCE = 3e-3


class QuadWeight:
    """Plain int8 matrices [B, N, K] with scales [B, N], and the same ones packed."""

    def __init__(self, batch: int, n: int, k: int, *, halves: int = 1) -> None:
        self.plain = torch.empty(batch, n, k, dtype=torch.int8).random_(-128, 128)
        self.scales = (torch.rand(batch, n) + 0.01) / 100 / k**0.5
        self.packed = self.plain.clone()
        self._matrices = self.packed.view(batch * halves, n // halves, k)
        kernels.pack_quads_(self._matrices)

    def unpacks(self) -> bool:
        kernels.unpack_quads_(self._matrices)
        same = torch.equal(self.packed, self.plain)
        kernels.pack_quads_(self._matrices)
        return same


def same_numbers(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def int8_cases() -> Iterator[Check]:
    for number, (n, k) in enumerate(itertools.product(OUTPUTS, INPUTS)):
        yield from linear_case(DTYPES[number % 2], ROWS[number % len(ROWS)], n, k, has_bias=number % 3 == 0)
    for number, rows in enumerate(ROWS):
        yield from linear_case(DTYPES[number % 2], rows, 70, 130, has_bias=number % 2 == 0)
    yield from awkward_rows()
    yield from rows_near_halves()
    yield from long_rows()
    for number, shape in enumerate(EXPERT_SHAPES):
        yield from expert_case(DTYPES[number % 2], shape, ROUTINGS[number % len(ROUTINGS)])


def int8_long_row_cases() -> Iterator[Check]:
    """Rows of whole multiples of 4 KiB, which lie further apart."""
    for dtype, rows in itertools.product(DTYPES, (1, 40)):
        yield from linear_case(dtype, rows, 33, 4096, has_bias=False)


def linear_case(dtype: torch.dtype, rows: int, n: int, k: int, *, has_bias: bool) -> Iterator[Check]:
    name = f"linear_int8 {dtype} {rows}x{n}x{k} bias={has_bias}"
    x, weight = torch.randn(rows, k).to(dtype), QuadWeight(1, n, k)
    bias = torch.randn(n).to(dtype) if has_bias else None

    def run(given: torch.Tensor) -> torch.Tensor:
        return kernels.linear_int8(given, weight.packed[0], bias, scales=weight.scales)

    out, expected = run(x), int8_reference.product(x, weight.plain[0], weight.scales[0])
    yield name, same_numbers(out, (expected if bias is None else expected + bias.float()).to(dtype))
    if rows:
        yield name + ": a row's bits", torch.equal(torch.cat([run(row[None].contiguous()) for row in x]), out)
    yield name + ": threads", same_on_any_threads(lambda: run(x))
    yield name + ": unpacked", weight.unpacks()


def awkward_rows() -> Iterator[Check]:
    """Rows of zeros, of very large and very small numbers, ties, and numbers that are not finite."""
    weight = QuadWeight(1, 40, 66)
    x = torch.randn(9, 66)
    x[0] = 0
    x[1] *= 1e30
    x[2] *= 1e-37
    x[3] *= 1e-43
    x[4] = torch.arange(66) + 0.5
    x[4, 0] = 127
    x[5] = -x[4]
    x[6, 9], x[7, 3], x[8, 65] = float("nan"), float("inf"), float("-inf")
    out = kernels.linear_int8(x, weight.packed[0], scales=weight.scales)
    expected = int8_reference.product(x, weight.plain[0], weight.scales[0])
    yield "linear_int8: awkward rows", same_numbers(out, expected)
    yield "linear_int8: what is not finite gives no numbers", bool(out[6:].isnan().all() and out[:6].isfinite().all())


def rows_near_halves() -> Iterator[Check]:
    """Numbers at and a few bits beside the middle of two whole ones, where all that decides is their exact quotient."""
    weight = QuadWeight(1, 40, 255)
    largest = (torch.rand(60, 1) + 0.5) * 10.0 ** torch.randint(-20, 20, (60, 1))
    halves = largest / 127 * (torch.arange(127) + 0.5)
    beside = (halves.view(torch.int32) + torch.randint(-3, 4, halves.shape, dtype=torch.int32)).view(torch.float32)
    x = torch.cat([largest, beside, -beside], dim=-1).clamp(-largest, largest)
    out = kernels.linear_int8(x, weight.packed[0], scales=weight.scales)
    yield "linear_int8: near halves", torch.equal(out, int8_reference.product(x, weight.plain[0], weight.scales[0]))


def long_rows() -> Iterator[Check]:
    """Sums that reach the ends of int32 are exact; more inputs than that are refused."""
    weight, signs = torch.full((1, 2, MOST_INPUTS), -128, dtype=torch.int8), torch.tensor([[1.0], [-1.0]])
    weight[0, 1] = 127
    kernels.pack_quads_(weight)
    out = kernels.linear_int8(127 * signs.repeat(1, MOST_INPUTS), weight[0], scales=torch.ones(2))
    expected = signs.double() * 127 * MOST_INPUTS * torch.tensor([[-128.0, 127.0]]).double()
    yield "linear_int8: long rows", torch.equal(out, expected.float())
    try:
        kernels.pack_quads_(torch.zeros(1, 1, MOST_INPUTS + 1, dtype=torch.int8))
    except RuntimeError as error:
        yield "linear_int8: too long rows", f"at most {MOST_INPUTS} can be added up" in str(error)
    else:
        yield "linear_int8: too long rows are refused", False


def expert_case(dtype: torch.dtype, shape: tuple[int, int, int, int, int], routing: str) -> Iterator[Check]:
    tokens, hidden, inter, experts, choices = shape
    name = f"experts_int8 {dtype} {shape} {routing}"
    x = torch.randn(tokens, hidden + 3).to(dtype)[:, :hidden]
    w13, w2 = QuadWeight(experts, 2 * inter, hidden, halves=2), QuadWeight(experts, hidden, inter)
    weights, ids = torch.rand(tokens, choices), draw_routing(routing, tokens, experts, choices)
    scales = {"w13_scales": w13.scales, "w2_scales": w2.scales}

    def run(chosen: torch.Tensor, **options: bool) -> torch.Tensor:
        given = x[chosen], w13.packed, w2.packed, weights[chosen], ids[chosen]
        return kernels.experts_int8(*given, **scales, **options)[0]

    everything = torch.arange(tokens)
    out, rows = kernels.experts_int8(x, w13.packed, w2.packed, weights, ids, f32_output=True, **scales)
    expected = int8_reference.experts(x, (w13.plain, w13.scales), (w2.plain, w2.scales), weights, ids)
    yield name, relative_error(out, expected) < EXPERT_TOLERANCE
    yield name + ": rows", rows.tolist() == [int((ids == e).sum()) for e in range(experts)]
    yield name + ": rounded once", torch.equal(run(everything), out.to(dtype))
    some = torch.randperm(tokens)[: tokens // 2 + 1]
    yield name + ": a row's bits", torch.equal(run(some, f32_output=True), out[some])
    yield name + ": threads", same_on_any_threads(lambda: run(everything))

    def on_shard(shard: slice, local: torch.Tensor) -> torch.Tensor:
        own = {"w13_scales": w13.scales[shard], "w2_scales": w2.scales[shard]}
        return kernels.experts_int8(x, w13.packed[shard], w2.packed[shard], weights, local, f32_output=True, **own)[0]

    yield from shard_parts(name, ids, experts, out, on_shard)
