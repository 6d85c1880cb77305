#!/usr/bin/env python
"""Measures the planner's choice against an exhaustive search: every candidate of a grid runs the same batch.

One engine runs the batch under each plan, one after another. The best five, the planner's choice and the engine's
defaults then run again by turns, since the best of many single measurements is partly luck.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from comparison import machine
from comparison.figures import paired_ratios, spread
from comparison.kept_profile import kept_profile
from comparison.report import table
from comparison.terminal import exit_code, say
from comparison.timed_batch import batch_seconds
from comparison.workload import model_config

from sgl_batch.config import BatchConfig
from sgl_batch.planner.candidate import Candidate
from sgl_batch.planner.candidates import Allowed
from sgl_batch.planner.cost_model import fit
from sgl_batch.planner.followed_run import Room
from sgl_batch.planner.search import MemoryMap, Planned, search
from sgl_batch.planner.workload import Workload, parse_workload

ROOT = Path(__file__).resolve().parent.parent
PREFILL = ((256, 512), (512, 2048), (1024, 4096), (2048, 8192))
DECODE = ((8, 8), (32, 32), (64, 64), (64, 256), (256, 256))
ACCUMULATE = (True, False)
CHOICE, DEFAULT = "planner's choice", "defaults"
_BEST = 5
_SETTINGS = ("b_attn_prefill", "b_moe_prefill", "b_attn_decode", "b_moe_decode", "accumulate")


def candidates() -> Iterator[Candidate]:
    """Yield the grid."""
    for (b_attn, b_moe), (rows, group), accumulate in itertools.product(PREFILL, DECODE, ACCUMULATE):
        yield Candidate(
            b_attn_prefill=b_attn, b_moe_prefill=b_moe, b_attn_decode=rows, b_moe_decode=group, accumulate=accumulate
        )


def name_of(settings: Mapping[str, Any]) -> str:
    """Return a plan in one line."""
    kind = {True: "accumulated", False: "apart", None: "accumulated in decode"}[settings["accumulate"]]
    return (
        f"{settings['b_attn_prefill']}/{settings['b_moe_prefill']}, "
        f"{settings['b_attn_decode']}/{settings['b_moe_decode']}, {kind}"
    )


def choice(model: Path, file: Path | None, workload: Workload) -> Planned:
    """Return the planner's winner for the workload, with the profile that is kept."""
    profile, layers = kept_profile(model, file)
    allowed = Allowed(cores=int(profile.machine["cores"]), most_running=max(group for _, group in DECODE))
    room = MemoryMap(phases={}, room=Room(device=1 << 30))
    return search(workload, fit(profile, layers), layers, allowed, lambda _: room).ranked[0]


class Measurement:
    """One engine, and the batch that it runs again and again with other token ids."""

    def __init__(self, options: argparse.Namespace) -> None:
        from sgl_batch import Engine

        self._vocabulary = int(model_config(options.model)["vocab_size"])
        self._draw = random.Random(5)
        largest = parse_workload(options.second_workload or options.workload)
        tokens = sum(one.prompt + one.output + 64 for one in largest.requests)
        most = max(group for _, group in DECODE)
        self._engine = Engine(
            model_path=str(options.model), max_total_tokens=tokens, b_moe_decode=most, log_level="error"
        )
        # Memory and kernels are ready then.
        self.seconds({name: BatchConfig().flat()[name] for name in _SETTINGS}, largest)

    def seconds(self, settings: Mapping[str, Any], workload: Workload) -> float:
        """Return the seconds of the batch under a plan."""
        self._engine.set_plan(**settings)
        return batch_seconds(self._engine, workload, self._draw, self._vocabulary)

    def end(self) -> None:
        """Stop the engine."""
        self._engine.shutdown()


def report(once: Mapping[str, float], again: Mapping[str, Mapping[int, float]], predicted: float) -> str:
    """Return the tables in Markdown. `once`: seconds of all candidates; `again`: of some by round."""
    best = min((name for name in again if name not in (CHOICE, DEFAULT)), key=lambda name: _median(again[name]))
    rows = []
    for name in sorted(again, key=lambda name: _median(again[name])):
        seconds, ratio = spread(again[name].values()), paired_ratios(again[name], again[best])
        assert seconds is not None, "it has run"
        assert ratio is not None, "all run in each round"
        rows.append([name, seconds.text(2), ratio.text(2)])
    values = sorted(once.values())
    return (
        f"{len(once)} candidates, one run each: {values[0]:.2f} to {values[-1]:.2f} s, median "
        f"{statistics.median(values):.2f} s. The planner predicted {predicted:.2f} s for its choice.\n\n"
        + table(["plan (sub-batch/group of prefill, of decode)", "seconds", "x the best"], rows)
        + "\n"
    )


def _median(rounds: Mapping[int, float]) -> float:
    return statistics.median(rounds.values())


def run(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Measure; return the report and the record's numbers."""
    workload = parse_workload(options.workload)
    second = parse_workload(options.second_workload) if options.second_workload else workload
    chosen = choice(options.model, options.profile_file, second)
    grid = {name_of(one.settings): one for one in candidates()}
    measurement = Measurement(options)
    once: dict[str, float] = {}
    plans = {name: one.settings for name, one in grid.items()}
    begun = time.monotonic()
    for name, settings in random.Random(2).sample(list(plans.items()), len(plans)):
        once[name] = measurement.seconds(settings, workload)
        left = (time.monotonic() - begun) / len(once) * (len(plans) - len(once))
        say(f"{len(once)}/{len(plans)} {name}: {once[name]:.2f} s; about {left:.0f} s to go, without the second part")
    defaults = {name: BatchConfig().flat()[name] for name in _SETTINGS}
    best = sorted(once, key=once.__getitem__)[:_BEST]
    twice = {name: plans[name] for name in best}
    # None asks for what the engine does by default about accumulation.
    twice[CHOICE] = {**chosen.candidate.settings, "accumulate": chosen.candidate.accumulate}
    twice[DEFAULT] = defaults
    again: dict[str, dict[int, float]] = {name: {} for name in twice}
    for number in range(options.rounds):
        for name in list(twice)[:: 1 if number % 2 == 0 else -1]:
            again[name][number] = measurement.seconds(twice[name], second)
        say(f"round {number + 1}/{options.rounds}")
    measurement.end()
    predicted = chosen.prediction.seconds
    record = {"once": once, "again": again, "choice": twice[CHOICE], "predicted_s": predicted}
    text = report(once, again, predicted) + f"\nThe planner's choice: {name_of(twice[CHOICE])}.\n"
    return text, record


def main(argv: Sequence[str]) -> int:
    """Measure, and write report and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the model's directory")
    parser.add_argument("--profile-file", type=Path, help="(the one in the user's cache)")
    parser.add_argument("--workload", default="128:32x64", help="(128:32x64)")
    parser.add_argument("--second-workload", help="of the second part, at least as large (--workload)")
    parser.add_argument("--rounds", type=int, default=5, help="of the best ones, by turns (5)")
    parser.add_argument("--out", type=Path, help="folder of the record (benchmark/out/plan-search-DATE)")
    options = parser.parse_args(argv)
    started = datetime.now().astimezone()
    out = options.out or ROOT / "benchmark" / "out" / f"plan-search-{started:%Y%m%d-%H%M%S}"
    text, found = run(options)
    out.mkdir(parents=True, exist_ok=True)
    record = {
        "machine": machine.hardware(),
        "source": machine.source(ROOT),
        "command": ["python", "benchmark/plan_search.py", *argv],
        "started": started.isoformat(),
        **found,
    }
    (out / "record.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (out / "report.md").write_text(text, encoding="utf-8")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("plan_search.py", lambda: main(sys.argv[1:])))
