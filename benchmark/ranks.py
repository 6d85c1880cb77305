#!/usr/bin/env python
"""Owns the measurement of ranks on a long-tailed workload: with migration, without, and against the bound.

Each engine runs in a process of its own, alternating round by round. The bound is max(total work / ranks, longest
sequence): the time of one rank on one rank's cores divided by the number of ranks, or that of the longest sequence
alone on all ranks, whichever is longer.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from comparison import machine
from comparison.figures import spread

from sgl_batch.errors import ConfigError

IDLE_PARTS = ("exchange", "agreement", "waiting")
BOUNDARY_PARTS = ("agreement", "copies")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, required=True, help="checkpoint directory (benchmark/offline.py makes one)"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--median-output-len", type=int, default=24, help="output lengths are scaled to this median")
    parser.add_argument("--trace", type=Path, help="CSV with a column GeneratedTokens; without, a made-up long tail")
    parser.add_argument("--boundary-tokens", type=int, default=64)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser.parse_args(argv)


def output_lengths(options: argparse.Namespace) -> list[int]:
    """Lengths from the trace, or with P99 = 3.8 x P95 and the largest 9 x P95, scaled to the median asked for."""
    draw = random.Random(options.seed)
    if options.trace is not None:
        with options.trace.open(encoding="utf-8") as file:
            known = [int(row["GeneratedTokens"]) for row in csv.DictReader(file)]
        lengths = draw.sample(known, options.num_prompts)
    else:
        lengths = made_up_lengths(options.num_prompts, draw)
    middle = statistics.median(lengths)
    scaled = [max(1, round(length * options.median_output_len / middle)) for length in lengths]
    draw.shuffle(scaled)
    return scaled


def made_up_lengths(count: int, draw: random.Random) -> list[float]:
    """Quantiles of a distribution with a long tail: P95 is 2.5 medians, P99 3.8 x P95, the largest 9 x P95."""
    points = [(0.0, 0.3), (0.5, 1.0), (0.95, 2.5), (0.99, 9.5), (1.0, 22.5)]
    lengths = []
    for index in range(count):
        share = (index + draw.random()) / count if index < count - 1 else 1.0
        upper = next(i for i, (quantile, _) in enumerate(points) if share <= quantile and i)
        (low_q, low), (high_q, high) = points[upper - 1], points[upper]
        lengths.append(100 * (low + (high - low) * (share - low_q) / (high_q - low_q)))
    return lengths


def run_engine(
    options: argparse.Namespace, settings: dict[str, Any], work: list[tuple[list[int], int]]
) -> dict[str, Any]:
    """Seconds of one workload in a fresh engine, after a short warm-up, and the statistics of that time."""
    import sgl_batch

    engine = sgl_batch.Engine(
        model_path=str(options.model),
        boundary_tokens=options.boundary_tokens,
        page_size=options.page_size,
        max_total_tokens=1 << 16,
        **settings,
    )
    try:
        generate(engine, [(ids, 2) for ids, _ in work[:4]])
        before = engine.batch_stats()
        begun = time.perf_counter()
        generate(engine, work)
        seconds = time.perf_counter() - begun
        return {"seconds": seconds, "ranks": rank_parts(before, engine.batch_stats())}
    finally:
        engine.shutdown()


def generate(engine: Any, work: list[tuple[list[int], int]]) -> None:
    sampling = [{"temperature": 0, "max_new_tokens": length, "ignore_eos": True} for _, length in work]
    engine.generate(input_ids=[ids for ids, _ in work], sampling_params=sampling)


def rank_parts(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, float]]:
    """Seconds by part of each rank between two statistics."""
    pairs = zip(before.get("ranks", [before]), after.get("ranks", [after]), strict=True)
    return [{part: new["part_s"][part] - old["part_s"][part] for part in new["part_s"]} for old, new in pairs]


def in_child(sender: Any, cores: list[int] | None, *arguments: Any) -> None:
    if cores is not None:
        os.sched_setaffinity(0, cores)
        os.environ["OMP_NUM_THREADS"] = str(len(cores))
    sender.send(run_engine(*arguments))


def measure(options: argparse.Namespace, settings: dict[str, Any], work: Any, cores: list[int] | None = None) -> Any:
    """`run_engine` in a process of its own, on these cores."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=in_child, args=(sender, cores, options, settings, work))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise SystemExit(f"the engine with {settings} ended without a result; its messages stand above") from None
    finally:
        process.join()


def kinds_of(options: argparse.Namespace) -> dict[str, tuple[dict[str, Any], list[int] | None]]:
    """What is measured in each round: settings of the engine, and the cores it gets (None: all)."""
    sizes = dict.fromkeys(("tp_size", "dp_size", "ep_size"), options.ranks)
    ranks = {**sizes, "enable_dp_attention": True, "rank_timeout_s": 60.0}
    cores = sorted(os.sched_getaffinity(0))
    return {
        "migration": ({**ranks, "migration": "even"}, None),
        "no migration": ({**ranks, "migration": "never"}, None),
        "one rank": ({}, cores[: max(1, len(cores) // options.ranks)]),
    }


def main(argv: list[str]) -> int:
    options = parse(argv)
    if not (options.model / "config.json").is_file():
        raise ConfigError(
            f"--model {options.model} holds no config.json; make one with benchmark/offline.py --make-model"
        )
    draw = random.Random(options.seed)
    lengths = output_lengths(options)
    work = [([draw.randrange(1000, 30000) for _ in range(options.input_len)], length) for length in lengths]
    kinds = kinds_of(options)
    found: dict[str, list[Any]] = {name: [] for name in (*kinds, "longest alone")}
    for number in range(1, options.rounds + 1):
        for name, (settings, cores) in kinds.items():
            found[name].append(measure(options, settings, work, cores))
            print(f"round {number}, {name}: {found[name][-1]['seconds']:.1f} s", file=sys.stderr, flush=True)
        longest = max(work, key=lambda item: item[1])
        found["longest alone"].append(measure(options, kinds["migration"][0], [longest]))
    report(options, lengths, found)
    return 0


def report(options: argparse.Namespace, lengths: list[int], found: dict[str, list[Any]]) -> None:
    """A table for people; all figures where --json says."""
    here = machine.hardware()
    ordered = sorted(lengths)
    print(
        f"{len(lengths)} sequences of {options.input_len} prompt tokens; output tokens: median "
        f"{statistics.median(lengths):.0f}, P95 {ordered[int(0.95 * len(ordered))]}, longest {ordered[-1]}, "
        f"together {sum(lengths)}. {machine.describe(here)}\n"
    )
    print("| | seconds | against the bound | idle share by rank | boundary share |\n| --- | ---: | ---: | --- | ---: |")
    bounds = [
        max(one["seconds"] / options.ranks, longest["seconds"])
        for one, longest in zip(found["one rank"], found["longest alone"], strict=True)
    ]
    for name, rounds in found.items():
        seconds = spread(run["seconds"] for run in rounds)
        against = spread(run["seconds"] / bound for run, bound in zip(rounds, bounds, strict=True))
        assert seconds is not None
        assert against is not None
        middle = min(rounds, key=lambda run: abs(run["seconds"] - seconds.median))
        idle = ", ".join(f"{share(rank, IDLE_PARTS):.0%}" for rank in middle["ranks"])
        boundary = max(share(rank, BOUNDARY_PARTS) for rank in middle["ranks"])
        print(f"| {name} | {seconds.text(1)} | {against.text(2)} | {idle} | {boundary:.2%} |")
    if options.json is not None:
        figures = {"machine": here, "lengths": lengths, "runs": found, "bound_s": bounds}
        options.json.write_text(json.dumps(figures, indent=1))


def share(parts: dict[str, float], names: tuple[str, ...]) -> float:
    """What part of a rank's time the named parts take."""
    return sum(parts[name] for name in names) / max(sum(parts.values()), 1e-9)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as error:
        sys.exit(f"ranks.py: error: {error}")
