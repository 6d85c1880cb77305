#!/usr/bin/env python
"""Measures how well the simulator tells stock SGLang, which binds a sequence to an engine for good, on a CPU.

Batches of equal lengths are measured, and seconds of a decode step, of a decoded row and so on fitted to them. With
these alone batches of unequal lengths are simulated, measured, and compared; so are batches that are dealt by turns to
two engines.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from comparison.figures import spread
from comparison.report import table
from comparison.terminal import exit_code, say
from stock_binding.engines import Limits, StockProcess, dealt, measure
from stock_binding.simulated import COUNTED, LineCosts, fit, simulate
from stock_binding.small_model import VOCABULARY, write_small_model
from stock_binding.workloads import CALIBRATION, Batch, batches

_CLOCKS = {"wall": "seconds", "processor": "processor_s"}
_ROWS, _TOKENS, _SCARCE_TOKENS, _CHUNK = 16, 1 << 15, 900, 512


def main(argv: Sequence[str]) -> int:
    """Measure and simulate all batches; print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="the Azure trace of LLM inference, for one of the batches")
    parser.add_argument("--repeat", type=int, default=3, help="how often each runs; the median counts (3)")
    parser.add_argument(
        "--clock",
        choices=_CLOCKS,
        default="wall",
        help="seconds of the wall, or processor seconds of the scheduler, for a machine that others use (wall)",
    )
    parser.add_argument("--log-dir", type=Path, help="keep the engines' messages here")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        logs = args.log_dir or Path(directory)
        logs.mkdir(parents=True, exist_ok=True)
        model = Path(directory, "model")
        write_small_model(model)
        roomy = Limits(
            model=model,
            vocabulary=VOCABULARY,
            max_running_requests=_ROWS,
            max_total_tokens=_TOKENS,
            chunked_prefill_size=_CHUNK,
        )
        limits = {"first": roomy, "second": roomy, "scarce": replace(roomy, max_total_tokens=_SCARCE_TOKENS)}
        started = {name: StockProcess(one, logs / f"{name}.log") for name, one in limits.items()}
        try:
            for process in started.values():
                process.ready()
            _compare(args, started, roomy)
        finally:
            for process in started.values():
                process.stop()
    return 0


def _compare(args: argparse.Namespace, started: Mapping[str, StockProcess], limits: Limits) -> None:
    """Measure everything so many times, one round after the other; fit, simulate, and print the tables."""
    pools = {1: [started["first"]], 2: [started["first"], started["second"]]}
    every, equal, unequal = batches(args.trace), defaultdict(list), defaultdict(list)
    clock, draw = _CLOCKS[args.clock], random.Random(1)
    todo = [*every, *((number, index) for number in pools for index in range(len(CALIBRATION)))]
    for round_number in range(args.repeat):
        # In random order, so that a busy minute of the machine disturbs what is fitted and what is compared alike.
        draw.shuffle(todo)
        for one in todo:
            if isinstance(one, Batch):
                pool = [started["scarce"]] if one.scarce else pools[one.engines]
                unequal[one.name].append(measure(pool, dealt(one.lengths, one.engines), clock))
            else:
                number, run = one[0], CALIBRATION[one[1]]
                equal[one].append(measure(pools[number], [run.lengths] * number, clock, run.times))
        say(f"round {round_number + 1}: load {os.getloadavg()[0]:.1f}")
    costs = {}
    for number in pools:
        costs[number], text = _fitted(
            [statistics.median(equal[number, index]) for index in range(len(CALIBRATION))], limits
        )
        print(f"{number} at once: {text}\n")
    _report(every, unequal, costs, {False: limits, True: started["scarce"].limits})


def _fitted(seconds: Sequence[float], limits: Limits) -> tuple[LineCosts, str]:
    costs, errors = fit(CALIBRATION, seconds, limits)
    shown = ", ".join(f"{name} {costs.seconds[name] * 1e3:.3g} ms" for name in COUNTED)
    return costs, f"{shown}; of the batches of equal lengths it is at most {max(map(abs, errors)):.0%} off"


def _report(
    every: Sequence[Batch],
    measured: Mapping[str, Sequence[float]],
    costs: Mapping[int, LineCosts],
    limits: Mapping[bool, Limits],
) -> None:
    rows, errors = [], []
    for batch in every:
        found = spread(measured[batch.name])
        assert found is not None, "it has run"
        simulated, retracted = _simulated(batch, limits[batch.scarce], costs[batch.engines])
        error = simulated / found.median - 1
        errors.append(abs(error))
        tokens = f"{sum(prompt for prompt, _ in batch.lengths):,} + {sum(output for _, output in batch.lengths):,}"
        counts = [str(len(batch.lengths)), tokens]
        rows.append([batch.name, *counts, found.text(2), f"{simulated:.2f}", f"{error:+.0%}", str(retracted)])
    heads = [
        "batch",
        "sequences",
        "prompt + output tokens",
        "measured s",
        "simulated s",
        "error",
        "retracted, simulated",
    ]
    print(table(heads, rows))
    print(f"\nErrors without sign: median {statistics.median(errors):.0%}, largest {max(errors):.0%}.")


def _simulated(batch: Batch, limits: Limits, costs: LineCosts) -> tuple[float, int]:
    """Return the seconds until the last engine has ended, and how many sequences were retracted."""
    ends = [simulate(part, limits, costs) for part in dealt(batch.lengths, batch.engines)]
    return max(account.seconds for account, _ in ends), sum(rank.tally.suspensions for _, rank in ends)


if __name__ == "__main__":
    sys.exit(exit_code("static_binding.py", lambda: main(sys.argv[1:])))
