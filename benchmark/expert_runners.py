#!/usr/bin/env python
"""Owns the measurement of the expert runners of this machine, by number of tokens, and of which is the fastest.

On a CPU: native and torch. On a GPU: SGLang's own, Triton, DeepGEMM (where it is installed) and torch. An engine beside
a GPU measures a few numbers of tokens by itself (`--expert-runner auto`). Not yet run on a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from comparison import machine
from comparison.figures import Spread, spread
from kernel_rates.shapes import Shapes, shapes_of

from sgl_batch.errors import ConfigError
from sgl_batch.kernel_loader import native_kernels
from sgl_batch.layers.moe.expert_runner import create_expert_runner
from sgl_batch.layers.packed_weights import PackedWeights

ROOT = Path(__file__).resolve().parent.parent
# One call of each runner, by its name.
Calls = dict[str, Callable[[], object]]


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="take the shapes of this checkpoint with experts (the 1.0e9 one's)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1 << power for power in range(0, 15, 2)])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sample-s", type=float, default=0.05, help="seconds that a sample takes at least (0.05)")
    options = parser.parse_args(argv)
    if min(*options.tokens, options.rounds, 1) < 1:
        raise ConfigError("a number below 1 is given; tokens and rounds are at least 1")
    return options


class Layer:
    """A layer of experts with random weights, and the runners that this machine has."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype) -> None:
        self.shapes, self.dtype = shapes, dtype
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.w13 = self._weights(2 * shapes.inter, shapes.hidden)
        self.w2 = self._weights(shapes.hidden, shapes.inter)
        names = ["torch"]
        if self.device == "cuda":
            from sgl_batch.sglang_adapter.fused_moe import prepare_process

            prepare_process("none")
            names = ["sglang", "triton", *names]
            names += ["deepgemm"] if importlib.util.find_spec("deep_gemm") and dtype == torch.bfloat16 else []
        self._runners: dict[str, tuple[Any, torch.Tensor, torch.Tensor]] = {
            name: (create_expert_runner(name), self.w13, self.w2) for name in names
        }
        if self.device == "cpu" and native_kernels() is not None:
            packed, w13, w2 = PackedWeights(native_kernels()), self.w13.clone(), self.w2.clone()
            packed.add_experts(w13, w2)
            self._runners["native"] = (packed.experts, w13, w2)

    def _weights(self, outputs: int, inputs: int) -> torch.Tensor:
        drawn = torch.randn(self.shapes.experts, outputs, inputs, device=self.device, dtype=self.dtype)
        return drawn.div_(inputs**0.5)

    def calls(self, tokens: int) -> Calls:
        """Return a call of each runner on the same combined batch, with even routing."""
        shapes = self.shapes
        x = torch.randn(tokens, shapes.hidden, device=self.device, dtype=self.dtype)
        ids = torch.rand(tokens, shapes.experts, device=self.device).topk(shapes.top_k).indices.to(torch.int32)
        weights = torch.rand(tokens, shapes.top_k, device=self.device)

        def call_of(runner: Any, w13: torch.Tensor, w2: torch.Tensor) -> Callable[[], object]:
            return lambda: runner(x, w13, w2, weights, ids)

        return {name: call_of(*parts) for name, parts in self._runners.items()}


def seconds_of(call: Callable[[], object], sample_s: float, device: str) -> float:
    """Return the mean seconds of a call, over as many calls as take `sample_s`, after a warm-up call."""
    finish = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    call()
    finish()
    begun, count = time.perf_counter(), 0
    while True:
        for _ in range(max(1, count)):
            call()
        count += max(1, count)
        finish()
        if time.perf_counter() - begun >= sample_s:
            return (time.perf_counter() - begun) / count


def measure(layer: Layer, options: argparse.Namespace) -> dict[int, dict[str, Spread]]:
    """Measure each runner's seconds for each number of tokens, in alternating rounds."""
    found: dict[int, dict[str, Spread]] = {}
    for tokens in options.tokens:
        calls = layer.calls(tokens)
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(options.rounds):
            for name, call in calls.items():
                seconds[name].append(seconds_of(call, options.sample_s, layer.device))
        found[tokens] = {name: known for name, values in seconds.items() if (known := spread(values)) is not None}
        print(f"{tokens} tokens measured", file=sys.stderr, flush=True)
    return found


def table(found: dict[int, dict[str, Spread]], shapes: Shapes) -> str:
    """Return milliseconds of a call in Markdown, median (smallest-largest), the fastest of each line in bold."""
    names = list(next(iter(found.values())))
    lines = [f"| tokens | per expert | {' | '.join(names)} |", "| ---: " * (2 + len(names)) + "|"]
    for tokens, spreads in found.items():
        best = min(spreads, key=lambda name: spreads[name].median)
        cells = []
        for name in names:
            one = spreads[name]
            ms = Spread(median=one.median * 1e3, low=one.low * 1e3, high=one.high * 1e3, count=one.count).text(3)
            cells.append(f"**{ms}**" if name == best else ms)
        per_expert = tokens * shapes.top_k / shapes.experts
        lines.append(f"| {tokens:,} | {per_expert:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    options = parse(argv)
    shapes = shapes_of(options.model)
    torch.manual_seed(0)
    layer = Layer(shapes, getattr(torch, options.dtype))
    found = measure(layer, options)
    about = {"source": machine.source(ROOT), "torch": torch.__version__, "command": " ".join(argv)}
    print(f"{machine.describe(machine.hardware())}; {about}\n{shapes}, {options.dtype}\n")
    print(f"Milliseconds of a call, median (smallest-largest) of {options.rounds} rounds:\n\n{table(found, shapes)}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as error:
        sys.exit(f"expert_runners.py: {error}")
