"""Compares one expert runner with float64 on random and awkward batches and prints a report.

It is a program because a process chooses an instruction set and Triton's interpreter once.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from runner_promises import PROMISES, prepare_runner

from sgl_batch.errors import ConfigError
from sgl_batch.layers.moe.clamped_experts import ClampedExperts

# tokens, hidden, intermediate, experts, choices
SHAPES = (
    (0, 64, 32, 4, 2),
    (1, 64, 32, 4, 2),
    (1, 1024, 384, 8, 8),
    (1, 160, 96, 8, 8),
    (5, 100, 50, 6, 6),
    (37, 128, 96, 8, 3),
    (68, 32, 130, 5, 1),
    (14, 48, 34, 20, 4),
    (30, 48, 34, 60, 4),
    (197, 32, 130, 5, 2),
    (200, 64, 64, 3, 1),
    (600, 64, 34, 60, 4),
    (4096, 32, 16, 8, 2),
)
# Shapes that are also run with biases and a clamped activation.
CLAMPED_SHAPES = ((1, 160, 96, 8, 8), (37, 128, 96, 8, 3), (68, 32, 130, 5, 1))
RANKS = (2, 4)
# The order in which a token's experts are added does not depend on the number of tokens: few are enough.
RANKED_TOKENS = 50
# Triton's interpreter takes some milliseconds for each block of a kernel, and each expert has blocks of its own.
INTERPRETED = "TRITON_INTERPRET" in os.environ
INTERPRETED_SIZE, INTERPRETED_EXPERTS = 160, 20
ROUTINGS = ("random", "one expert takes all", "one expert has none", "some choices have no expert")


@dataclass(frozen=True)
class Batch:
    """A layer's weights, and a combined batch with its routing."""

    x: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    clamped: ClampedExperts | None = None

    def some(self, tokens: torch.Tensor) -> Batch:
        return replace(self, x=self.x[tokens], weights=self.weights[tokens], ids=self.ids[tokens])

    def shard(self, rank: int, ranks: int) -> Batch:
        """Return the batch with a rank's contiguous share of the experts."""
        size = len(self.w13) // ranks
        local = self.ids - rank * size
        local = torch.where((local < 0) | (local >= size), -1, local)
        own = slice(rank * size, (rank + 1) * size)
        clamped = self.clamped
        if clamped is not None:
            clamped = replace(clamped, w13_bias=clamped.w13_bias[own], w2_bias=clamped.w2_bias[own])
        return replace(self, w13=self.w13[own].contiguous(), w2=self.w2[own].contiguous(), ids=local, clamped=clamped)


def draw_routing(name: str, tokens: int, experts: int, choices: int) -> torch.Tensor:
    ids = torch.stack([torch.randperm(experts)[:choices] for _ in range(tokens)]) if tokens else torch.empty(0, choices)
    ids = ids.to(torch.int32)
    if name == "one expert takes all":
        ids = torch.full_like(ids, -1)
        ids[:, 0] = experts - 1
    elif name == "one expert has none":
        ids[ids == 0] = -1
    elif name == "some choices have no expert" and tokens:
        ids[torch.rand(ids.shape) < 0.5] = -1
        ids[0] = -1
    return ids.contiguous()


def draw(shape: tuple[int, ...], routing: str, dtype: torch.dtype, device: str, *, clamped: bool) -> Batch:
    tokens, hidden, inter, experts, choices = shape
    wide = torch.randn(tokens, hidden + 7).to(dtype)
    return Batch(
        wide.to(device)[:, :hidden],
        (torch.randn(experts, 2 * inter, hidden) / hidden**0.5).to(dtype).to(device),
        (torch.randn(experts, hidden, inter) / inter**0.5).to(dtype).to(device),
        torch.rand(tokens, choices).to(device),
        draw_routing(routing, tokens, experts, choices).to(device),
        draw_clamped(experts, hidden, inter, device) if clamped else None,
    )


def draw_clamped(experts: int, hidden: int, inter: int, device: str) -> ClampedExperts:
    """Return biases, and a limit that many of the numbers reach."""
    biases = torch.randn(experts, 2 * inter).to(device), torch.randn(experts, hidden).to(device)
    return ClampedExperts(w13_bias=biases[0], w2_bias=biases[1], alpha=1.702, limit=1.5)


def expert_in_float64(batch: Batch, expert: int, rows: torch.Tensor) -> torch.Tensor:
    product, down, clamped = rows @ batch.w13[expert].double().T, batch.w2[expert].double().T, batch.clamped
    if clamped is None:
        gate, up = product.chunk(2, dim=-1)
        return (F.silu(gate) * up) @ down
    product = product + clamped.w13_bias[expert].double()
    gate, up = product[:, ::2].clamp(max=clamped.limit), product[:, 1::2].clamp(-clamped.limit, clamped.limit)
    return (gate * torch.sigmoid(clamped.alpha * gate) * (up + 1)) @ down + clamped.w2_bias[expert].double()


def in_float64(batch: Batch) -> torch.Tensor:
    """Return the output by definition."""
    out = torch.zeros(batch.x.shape, dtype=torch.float64, device=batch.x.device)
    for expert in range(len(batch.w13)):
        token, choice = torch.where(batch.ids == expert)
        rows = expert_in_float64(batch, expert, batch.x[token].double())
        out.index_add_(0, token, rows * batch.weights[token, choice, None].double())
    return out


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    if expected.numel() == 0:
        return 0.0 if found.shape == expected.shape else float("inf")
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    return float((found.double() - expected).norm() / expected.norm().clamp_min(1e-30))


Input = tuple[torch.dtype, tuple[int, ...], str, bool]


def inputs(name: str, dtypes: Iterable[torch.dtype], *, clamped: bool) -> Iterator[Input]:
    """Return every shape with every routing, or with one routing by turns.

    By turns for the native kernels, as test/unit/kernels runs every pair, and for Triton's interpreter, which also gets
    small shapes only.
    """
    more = itertools.product(dtypes, CLAMPED_SHAPES if clamped else (), ROUTINGS[-1:], [True])
    if INTERPRETED:
        small = [shape for shape in SHAPES if max(shape) <= INTERPRETED_SIZE and shape[3] <= INTERPRETED_EXPERTS]
        dtypes_by_turns = itertools.cycle(dtypes)
        more = ((next(dtypes_by_turns), *one) for one in itertools.product(CLAMPED_SHAPES, ROUTINGS[-1:], [True]))
        return itertools.chain(by_turns(dtypes, small), more if clamped else ())
    if name == "native":
        return itertools.chain(by_turns(dtypes, SHAPES), more)
    everything = ((*one, False) for one in itertools.product(dtypes, SHAPES, ROUTINGS))
    return itertools.chain(everything, more)


def by_turns(dtypes: Iterable[torch.dtype], shapes: Iterable[tuple[int, ...]]) -> Iterator[Input]:
    pairs = itertools.product(dtypes, shapes)
    return ((*pair, ROUTINGS[number % len(ROUTINGS)], False) for number, pair in enumerate(pairs))


def cases(name: str, device: str) -> Iterator[tuple[str, bool]]:
    promise, prepare = PROMISES[name], prepare_runner(name)

    def run(batch: Batch, *, f32_output: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        runner = prepare(batch.w13, batch.w2, batch.clamped)
        return runner(batch.x, batch.w13, batch.w2, batch.weights, batch.ids, f32_output=f32_output)

    if not promise.clamped:
        yield (
            f"{name}: biases are refused",
            refuses(lambda: run(draw(SHAPES[1], ROUTINGS[0], torch.bfloat16, device, clamped=True))),
        )
    for number, (dtype, shape, routing, clamped) in enumerate(inputs(name, promise.error, clamped=promise.clamped)):
        batch = draw(shape, routing, dtype, device, clamped=clamped)
        case = f"{name} {dtype} {shape} {routing}{' clamped' * clamped}"
        out, rows = run(batch)
        yield f"{case}: float32", out.dtype == torch.float32
        yield case, relative_error(out, in_float64(batch)) < promise.error[dtype]
        yield f"{case}: rows", rows.tolist() == [int((batch.ids == e).sum()) for e in range(len(batch.w13))]
        again, _ = run(batch, f32_output=False)
        yield f"{case}: number type", again.dtype == dtype
        if promise.rounds_once:
            yield f"{case}: repeated and rounded", torch.equal(again, out.to(dtype))
        if promise.own_bits:
            some = torch.randperm(shape[0], device=device)[: shape[0] // 2 + 1]
            yield f"{case}: a token's bits", torch.equal(run(batch.some(some))[0], out[some])
        if promise.tree_order and shape[0] <= RANKED_TOKENS:
            yield from sharded(case, batch, out, run, RANKS[number % 2 :][:1] if INTERPRETED else RANKS)


def refuses(call: Callable[[], object]) -> bool:
    try:
        call()
    except ConfigError:
        return True
    return False


def sharded(case, batch, whole, run, numbers_of_ranks) -> Iterator[tuple[str, bool]]:
    """Compare experts on 2 or 4 ranks, whose sums are added as a tree, with the bits of one rank."""
    for ranks in numbers_of_ranks:
        if len(batch.w13) % ranks:
            continue
        parts = [run(batch.shard(rank, ranks))[0] for rank in range(ranks)]
        while len(parts) > 1:
            parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
        yield f"{case}: {ranks} ranks", torch.equal(parts[0], whole)


def main(name: str, device: str) -> None:
    torch.manual_seed(0)
    # Makes torch fill uninitialised memory with NaN.
    torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms imports a compiler
    checked, failures = 0, []
    for case, holds in cases(name, device):
        checked += 1
        if not holds:
            failures.append(case)
    json.dump({"checked": checked, "failures": failures}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
