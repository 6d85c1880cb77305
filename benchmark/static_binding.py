#!/usr/bin/env python
"""Measures how well the simulator tells stock SGLang, which binds a sequence to an engine for good, on a CPU.

Batches of equal lengths are measured, and seconds of a decode step, of a decoded row and so on fitted to them. With
these alone batches of unequal lengths are simulated, measured, and compared; so are batches that are dealt by turns to
two engines, and batches of which SGLang retracts sequences. How many passes, steps, rows and retractions a batch takes
is counted in SGLang's messages, and compared too; what a step takes makes no difference to that.
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
from dataclasses import fields, replace
from pathlib import Path

from comparison.figures import spread
from comparison.report import table
from comparison.terminal import exit_code, say
from stock_binding.engine_log import Counts, total
from stock_binding.engines import Limits, Measured, StockProcess, dealt, measure
from stock_binding.simulated import COUNTED, LineCosts, counts_in, fit, simulate
from stock_binding.small_model import VOCABULARY, write_small_model
from stock_binding.workloads import CALIBRATION, Batch, batches

_CLOCKS = {"wall": "seconds", "processor": "processor_s"}
_COUNT_HEADS = ("prefill passes", "decode steps", "decoded rows", "retracted", "tokens computed again")
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
                equal[one].append(measure(pools[number], [run.lengths] * number, clock, run.times).seconds)
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
    measured: Mapping[str, Sequence[Measured]],
    costs: Mapping[int, LineCosts],
    limits: Mapping[bool, Limits],
) -> None:
    rows, counted, errors = [], [], []
    for batch in every:
        found = spread([one.seconds for one in measured[batch.name]])
        assert found is not None, "it has run"
        simulated, counts = _simulated(batch, limits[batch.scarce], costs[batch.engines])
        error = simulated / found.median - 1
        errors.append(abs(error))
        tokens = f"{sum(prompt for prompt, _ in batch.lengths):,} + {sum(output for _, output in batch.lengths):,}"
        sequences = str(len(batch.lengths))
        rows.append([batch.name, sequences, tokens, found.text(2), f"{simulated:.2f}", f"{error:+.0%}"])
        counted.append([batch.name, *_beside([one.counts for one in measured[batch.name]], counts)])
    print(table(["batch", "sequences", "prompt + output tokens", "measured s", "simulated s", "error"], rows))
    print(f"\nErrors without sign: median {statistics.median(errors):.0%}, largest {max(errors):.0%}.\n")
    print("Counted in SGLang's messages; beside it, where it differs, what is simulated.\n")
    print(table(["batch", *_COUNT_HEADS], counted))


def _simulated(batch: Batch, limits: Limits, costs: LineCosts) -> tuple[float, Counts]:
    """Return the seconds until the last engine has ended, and what all engines did."""
    ends = [simulate(part, limits, costs) for part in dealt(batch.lengths, batch.engines)]
    return max(account.seconds for account, _ in ends), total(counts_in(account, rank) for account, rank in ends)


def _beside(measured: Sequence[Counts], simulated: Counts) -> list[str]:
    """Return each count: the measured one, or the least and the most of rounds that differ, and the simulated one."""
    cells = []
    for field in fields(Counts):
        found = sorted({getattr(one, field.name) for one in measured})
        text = "-".join(f"{one:,}" for one in found[:: max(1, len(found) - 1)])
        one = getattr(simulated, field.name)
        cells.append(text if found == [one] else f"{text}; {one:,}")
    return cells


if __name__ == "__main__":
    sys.exit(exit_code("static_binding.py", lambda: main(sys.argv[1:])))
