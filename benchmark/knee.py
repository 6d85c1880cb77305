#!/usr/bin/env python
"""Owns the measurement of a model's throughput against b_moe, with accumulation and without; plot_knee.py draws it.

One engine measures all: the plan changes between two requests. In decode as many sequences run as one expert call
combines; in prefill the same prompts are taken in groups of b_moe tokens. Attention goes through the same sub-batches
of b_attn either way; without accumulation the experts are called once for each of them. The order alternates.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from comparison import machine
from comparison.figures import spread
from comparison.report import table
from comparison.terminal import say

from sgl_batch.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent


@dataclass(slots=True, kw_only=True)
class Point:
    """The tokens per second of one phase, by round, at one size of the expert call."""

    phase: str
    b_moe: int
    accumulate: bool
    tokens_per_s: list[float] = field(default_factory=list)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint (benchmark/offline.py makes one)")
    parser.add_argument("--decode", type=int, nargs="+", default=[1 << power for power in range(9)], metavar="B_MOE")
    parser.add_argument(
        "--prefill", type=int, nargs="+", default=[1 << power for power in range(7, 14)], metavar="B_MOE"
    )
    parser.add_argument("--b-attn-decode", type=int, default=16, help="sequences (16)")
    parser.add_argument("--b-attn-prefill", type=int, default=128, help="tokens (128)")
    parser.add_argument("--input-len", type=int, default=32, help="tokens of a prompt that is decoded (32)")
    parser.add_argument("--steps", type=int, default=32, help="decode steps that are timed (32)")
    parser.add_argument("--prompt-len", type=int, default=128, help="tokens of a prompt that is prefilled (128)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file, for plot_knee.py")
    options = parser.parse_args(argv)
    if not (options.model / "config.json").is_file():
        raise ConfigError(f"--model {options.model} holds no config.json; benchmark/offline.py --make-model writes one")
    if min(*options.decode, *options.prefill, options.rounds, options.steps) < 1:
        raise ConfigError("a size, the rounds or the steps are below 1")
    return options


class Knee:
    """Measures points with one engine."""

    def __init__(self, engine: Any, options: argparse.Namespace) -> None:
        self._engine, self._options = engine, options
        self._draw = random.Random(0)
        self.points = [
            Point(phase=phase, b_moe=b_moe, accumulate=accumulate)
            for phase, sizes in (("decode", options.decode), ("prefill", options.prefill))
            for b_moe in sizes
            for accumulate in (True, False)
            if accumulate or b_moe > self._b_attn(phase)
        ]

    def run(self, rounds: int, say: Callable[[str], None]) -> None:
        """Measure every point once in each round; every other round has the reverse order."""
        self._measure(self.points[0])  # an engine's first requests are slow
        for number in range(1, rounds + 1):
            for point in self.points if number % 2 else reversed(self.points):
                point.tokens_per_s.append(self._measure(point))
                way = "accumulated" if point.accumulate else "by sub-batch"
                say(f"round {number}, {point.phase} {point.b_moe} {way}: {point.tokens_per_s[-1]:.0f} tokens/s")

    def _b_attn(self, phase: str) -> int:
        sizes: dict[str, int] = {"decode": self._options.b_attn_decode, "prefill": self._options.b_attn_prefill}
        return sizes[phase]

    def _measure(self, point: Point) -> float:
        b_attn = min(self._b_attn(point.phase), point.b_moe)
        if point.phase == "decode":
            sizes = {"b_moe_decode": point.b_moe, "b_attn_decode": b_attn}
            self._engine.set_plan(**sizes, accumulate=point.accumulate)
            return self._decode_rate(point.b_moe)
        sizes = {"b_moe_prefill": point.b_moe, "b_attn_prefill": b_attn}
        self._engine.set_plan(**sizes, accumulate=point.accumulate)
        prompts = self._prompts(max(self._options.prefill) // self._options.prompt_len, self._options.prompt_len)
        return len(prompts) * self._options.prompt_len / self._seconds(prompts, 1)

    def _decode_rate(self, sequences: int) -> float:
        """Measure the steps after the first token: the time of all tokens less that of the first."""
        prompts = self._prompts(sequences, self._options.input_len)
        first = self._seconds(prompts, 1)
        return sequences * self._options.steps / (self._seconds(prompts, 1 + self._options.steps) - first)

    def _prompts(self, count: int, length: int) -> list[list[int]]:
        return [[self._draw.randrange(1000, 30000) for _ in range(length)] for _ in range(count)]

    def _seconds(self, prompts: list[list[int]], output_len: int) -> float:
        sampling = {"temperature": 0, "max_new_tokens": output_len, "ignore_eos": True}
        begun = time.perf_counter()
        self._engine.generate(input_ids=prompts, sampling_params=sampling)
        return time.perf_counter() - begun


def main(argv: list[str]) -> int:
    options = parse(argv)
    import sgl_batch

    engine = sgl_batch.Engine(
        model_path=str(options.model),
        dtype="bfloat16",
        b_moe_decode=max(options.decode),
        b_moe_prefill=max(options.prefill),
        ready_ahead=0.0,
    )
    try:
        knee = Knee(engine, options)
        knee.run(options.rounds, say)
        kernels = engine.running["kernels"]
    finally:
        engine.shutdown()
    about = {
        "machine": machine.hardware(),
        "source": machine.source(ROOT),
        "kernels": kernels,
        "date": f"{datetime.now():%Y-%m-%d}",
        "command": ["python", "benchmark/knee.py", *argv],
        "b_attn": {"decode": options.b_attn_decode, "prefill": options.b_attn_prefill},
    }
    print(report(about, knee.points), end="")
    if options.json is not None:
        figures = {**about, "points": [asdict(point) for point in knee.points]}
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


def report(about: dict[str, Any], points: list[Point]) -> str:
    """Return a table of each phase."""
    text = f"{machine.describe(about['machine'])}; {about['kernels']}\n{' '.join(about['command'])}\n"
    for phase in ("decode", "prefill"):
        by_size: dict[int, dict[bool, Point]] = {}
        for point in points:
            if point.phase == phase:
                by_size.setdefault(point.b_moe, {})[point.accumulate] = point
        rows = [(str(b_moe), *_cells(found)) for b_moe, found in by_size.items()]
        headings = ("b_moe", "tokens/s", f"experts by sub-batch of {about['b_attn'][phase]}", "accumulation is")
        text += f"\n{phase}\n\n{table(headings, rows)}\n"
    return text


def _cells(found: dict[bool, Point]) -> tuple[str, str, str]:
    texts = []
    for accumulate in (True, False):
        speed = spread(found[accumulate].tokens_per_s) if accumulate in found else None
        texts.append("" if speed is None else speed.text(0))
    if len(found) < 2:
        return texts[0], texts[1], ""
    ratios = [a / b for a, b in zip(found[True].tokens_per_s, found[False].tokens_per_s, strict=True)]
    return texts[0], texts[1], f"{statistics.median(ratios):.2f} times as fast"


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as error:
        sys.exit(f"knee.py: {error}")
