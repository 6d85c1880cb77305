#!/usr/bin/env python
"""Owns the measurement of admission: many lines whose answers are much shorter than their max_tokens, in little memory.

Lengths are forced by a stop token of each line, which neither the forecast nor admission sees.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from comparison import machine
from comparison.figures import paired_ratios, spread
from comparison.report import table
from comparison.terminal import exit_code, say
from comparison.workload import model_config

ROOT = Path(__file__).resolve().parent.parent
RESERVE, TWO_PAGE, FORECAST, KNOWN = "reserve", "two-page", "forecast", "lengths known"
CASES = (RESERVE, TWO_PAGE, FORECAST, KNOWN)
STORES = {"no store": {}, "store": {"kv_store_mode": "inclusive", "decode_kv": "resident"}}
MOST_TOKENS = 1024
# A boundary at each page, and a decode group as large as memory allows.
_PLAN = {"page_size": 16, "boundary_tokens": 16, "b_moe_decode": 512}
# Of the lognormal distribution of lengths.
_SIGMA = 0.9
_COUNTERS = ("decode_groups", "decode_rows", "suspensions", "reservations_exceeded", "recomputed_tokens_unplanned")
NOTE = """\
Medians (smallest-largest) of the rounds. Steps: decode steps, which do not depend on what else the machine does. Rows a
step: sequences in a decode step, on average. Stalled: how often a sequence was suspended. Exceeded: how often one went
on beyond its reservation to its end. "lengths known": max_tokens is the true length of each line, and all is reserved.
The bar: at most a third of reserve's time, and at most 1.15 times that with known lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A request and what will come of it: `length` tokens, because `stop` is first sampled there (None: by EOS).

    `bias`: what keeps EOS away.
    """

    prompt: list[int]
    seed: int
    length: int
    stop: int | None
    bias: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One case of one round."""

    seconds: float
    counters: dict[str, int]
    same_tokens: bool


def answer_lengths(count: int, mean: float, most: int, rng: random.Random) -> list[int]:
    """Return lengths with a long tail, of about this mean, none longer than `most`."""
    drawn = [rng.lognormvariate(0, _SIGMA) for _ in range(count)]
    scale = mean * count / sum(drawn)
    return [min(most, max(1, round(value * scale))) for value in drawn]


def stopped(tokens: Sequence[int], wanted: int, eos: Sequence[int]) -> tuple[int, int | None]:
    """Return where an output ends, and the stop token that ends it there: the first from `wanted` on that is new in it.

    If there is none, it is the last new one before. An output that has EOS before ends there by itself.
    """
    ends = next((position for position, token in enumerate(tokens) if token in eos), len(tokens))
    first: dict[int, int] = {}
    for position, token in enumerate(tokens[:ends]):
        first.setdefault(token, position)
    new = sorted((position, token) for token, position in first.items())
    late = next(((position, token) for position, token in new if position + 1 >= wanted), None)
    if late is None and ends < len(tokens):
        return ends + 1, None
    position, token = late if late is not None else new[-1]
    return position + 1, token


def pages_of(lines: Sequence[Line], page: int) -> int:
    """Return the pages that all lines reserve together at their max_tokens."""
    return sum(-(-(len(line.prompt) + MOST_TOKENS - 1) // page) for line in lines)


def sampling(line: Line, *, known: bool) -> dict[str, Any]:
    """Return the sampling parameters of a line."""
    parameters: dict[str, Any] = {"temperature": 1.0, "sampling_seed": line.seed, "logit_bias": line.bias}
    if known:
        return {**parameters, "max_new_tokens": line.length}
    stop = [] if line.stop is None else [line.stop]
    return {**parameters, "max_new_tokens": MOST_TOKENS, "stop_token_ids": stop}


class Measurement:
    """Engines of one command, one after the other. Each is asked for the same lines."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        config = model_config(options.model)
        rng = random.Random(options.seed)
        eos = config.get("eos_token_id")
        self._eos = [eos] if isinstance(eos, int) else list(eos or ())
        self._prompts = [
            [
                rng.randrange(5, config["vocab_size"])
                for _ in range(rng.randint(options.input_len // 2, options.input_len))
            ]
            for _ in range(options.lines)
        ]
        self._targets = answer_lengths(options.lines, options.mean_len, options.longest, rng)
        self._token_bytes = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
        self._token_bytes *= 4 if options.dtype == "float32" else 2
        self.lines: list[Line] = []
        self._tokens: list[list[int]] = []
        self.pool_pages = 0
        self.rounds: list[dict[str, Run]] = []

    def _engine(self, **arguments: Any) -> Any:
        from sgl_batch import Engine

        return Engine(model_path=str(self.options.model), dtype=self.options.dtype, **{**_PLAN, **arguments})

    def prepare(self) -> None:
        """Find a stop token for each line, in an engine that has room for all."""
        engine = self._engine(max_total_tokens=2 * sum(map(len, self._prompts)) + 8 * sum(self._targets))
        bias = {str(token): -100.0 for token in self._eos}
        asked = [
            {"temperature": 1.0, "sampling_seed": number, "max_new_tokens": 2 * length + 8, "logit_bias": bias}
            for number, length in enumerate(self._targets)
        ]
        answers = engine.generate(input_ids=self._prompts, sampling_params=asked)
        engine.shutdown()
        for number, (prompt, answer) in enumerate(zip(self._prompts, answers, strict=True)):
            length, stop = stopped(answer["output_ids"], self._targets[number], self._eos)
            self.lines.append(Line(prompt=prompt, seed=number, length=length, stop=stop, bias=bias))
            self._tokens.append(answer["output_ids"][:length])
        self.pool_pages = int(self.options.pool_share * pages_of(self.lines, 16))

    def run(self) -> None:
        """All rounds; every second one goes the other way."""
        todo = [(store, case) for store in self.options.stores.split(",") for case in CASES]
        for number in range(self.options.rounds):
            self.rounds.append({})
            for store, case in todo[:: 1 if number % 2 == 0 else -1]:
                run = self.rounds[-1][f"{store}, {case}"] = self._run(store, case)
                say(f"round {number + 1}/{self.options.rounds}, {store}, {case}: {run.seconds:.1f} s")

    def _run(self, store: str, case: str) -> Run:
        arguments = dict(STORES[store])
        if store != "no store":
            arguments["kv_store_bytes"] = self.pool_pages * 16 * self._token_bytes
        admission = RESERVE if case == KNOWN else case
        engine = self._engine(max_total_tokens=16 * self.pool_pages, admission=admission, **arguments)
        try:
            # Of two short answers a forecast has to recover.
            engine.generate(input_ids=self._prompts[:2], sampling_params={"max_new_tokens": 4, "ignore_eos": True})
            before = engine.batch_stats()["counters"]
            asked = [sampling(line, known=case == KNOWN) for line in self.lines]
            began = time.perf_counter()
            answers = engine.generate(input_ids=self._prompts, sampling_params=asked)
            seconds = time.perf_counter() - began
            after = engine.batch_stats()["counters"]
        finally:
            engine.shutdown()
        return Run(
            seconds=seconds,
            counters={name: after.get(name, 0) - before.get(name, 0) for name in _COUNTERS},
            same_tokens=[answer["output_ids"] for answer in answers] == self._tokens,
        )

    def describe(self) -> str:
        """What was asked."""
        lengths = [line.length for line in self.lines]
        return (
            f"{len(lengths)} lines with max_tokens {MOST_TOKENS:,}, prompts of {min(map(len, self._prompts))} to "
            f"{max(map(len, self._prompts))} tokens, answers of {statistics.mean(lengths):.0f} on average (median "
            f"{statistics.median(lengths):.0f}, longest {max(lengths)}); {self.pool_pages:,} pages of 16 tokens for "
            f"{pages_of(self.lines, 16):,} that all would reserve."
        )


def markdown(description: str, rounds: Sequence[dict[str, Run]]) -> str:
    """Return the report of rounds that are whole."""
    rows = []
    for name in rounds[0]:
        store, case = name.split(", ")
        seconds = _seconds(rounds, name)
        found = spread(seconds.values())
        assert found is not None, "there is a round"
        ratios = [paired_ratios(seconds, _seconds(rounds, f"{store}, {other}")) for other in (RESERVE, KNOWN)]
        runs = [done[name] for done in rounds]
        rows.append(
            [
                store,
                case,
                found.text(1),
                *("-" if ratio is None else ratio.text(2) for ratio in ratios),
                f"{statistics.median(run.counters['decode_groups'] for run in runs):.0f}",
                f"{statistics.median(_rows_a_step(run) for run in runs):.0f}",
                *(f"{statistics.median(run.counters[key] for run in runs):.0f}" for key in _COUNTERS[2:]),
                "yes" if all(run.same_tokens for run in runs) else "NO",
            ]
        )
    headings = ["", "admission", "seconds", "x reserve", "x known", "steps", "rows a step"]
    headings += ["stalled", "exceeded", "computed twice", "same tokens"]
    return f"{description} {len(rounds)} rounds.\n\n{table(headings, rows)}\n\n{NOTE}\n"


def _seconds(rounds: Sequence[dict[str, Run]], name: str) -> dict[int, float]:
    return {number: done[name].seconds for number, done in enumerate(rounds) if name in done}


def _rows_a_step(run: Run) -> float:
    return run.counters["decode_rows"] / max(1, run.counters["decode_groups"])


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "test/models/tiny-qwen3-moe", help="(the tiny test model)")
    parser.add_argument("--dtype", default="float32", help="(float32)")
    parser.add_argument("--lines", type=int, default=400, help="(400)")
    parser.add_argument("--input-len", type=int, default=64, help="tokens of a prompt, at least half as many (64)")
    parser.add_argument("--mean-len", type=int, default=48, help="tokens of an answer on average (48)")
    parser.add_argument("--pool-share", type=float, default=0.1, help="of what all lines would reserve (0.1)")
    parser.add_argument("--longest", type=int, default=192, help="tokens of the longest answers (192)")
    parser.add_argument("--stores", default=",".join(STORES), help=f"({','.join(STORES)})")
    parser.add_argument("--rounds", type=int, default=3, help="(3)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and lengths (0)")
    parser.add_argument("--out", type=Path, help="folder of the record (benchmark/out/admission-DATE)")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Measure, and write report and record."""
    options = parse_arguments(argv)
    started = datetime.now().astimezone()
    out = options.out or ROOT / "benchmark" / "out" / f"admission-{started:%Y%m%d-%H%M%S}"
    measurement = Measurement(options)
    measurement.prepare()
    say(measurement.describe())
    measurement.run()
    out.mkdir(parents=True, exist_ok=True)
    text = markdown(measurement.describe(), measurement.rounds)
    record = {
        "machine": machine.hardware(),
        "source": machine.source(ROOT),
        "command": ["python", "benchmark/admission.py", *argv],
        "started": started.isoformat(),
        "description": measurement.describe(),
        "rounds": [{name: asdict(run) for name, run in done.items()} for done in measurement.rounds],
    }
    (out / "record.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (out / "report.md").write_text(text, encoding="utf-8")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("admission.py", lambda: main(sys.argv[1:])))
