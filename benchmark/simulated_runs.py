#!/usr/bin/env python
"""Measures how well the simulator tells a run: ten runs of the engine, replayed, and simulated by the profile.

Each run is recorded. Its decisions are made again from the recorded states, and must be the same. Then the same
sequences are simulated with the same plan and memory, and the two times of completion compared. --picture draws how
many sequences ran over time, measured and simulated.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comparison.kept_profile import kept_profile
from comparison.report import table
from comparison.terminal import exit_code, say
from comparison.timed_batch import batch_seconds
from comparison.workload import model_config
from plan_runs import workload_of

from sgl_batch.core.admission_policy import make_admission
from sgl_batch.core.replay import replay_trace
from sgl_batch.core.units import FUSED
from sgl_batch.errors import ConfigError
from sgl_batch.planner.candidate import DEVICE, EXCLUSIVE, INCLUSIVE, STREAMED, Candidate
from sgl_batch.planner.cost_model import fit
from sgl_batch.planner.pass_cost import PassCost
from sgl_batch.simulator.machine_costs import MachineCosts
from sgl_batch.simulator.recorded import RecordedRun, read_run, running_over_time, simulated
from sgl_batch.simulator.timeline import Account

_PAGE = 64
_WIDE = {"b_attn_prefill": 2048, "b_moe_prefill": 8192, "b_attn_decode": 256, "b_moe_decode": 256}
_NARROW = {**_WIDE, "b_attn_decode": 16, "b_moe_decode": 16}
_POOL, _SMALL = {"max_total_tokens": 1 << 16}, {"max_total_tokens": 40 * _PAGE}
_STORE = {"kv_store_bytes": 2 << 30}
_RANKS = {"tp_size": 2, "dp_size": 2, "ep_size": 2, "enable_dp_attention": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run: a workload as plan_runs.py takes it, and arguments of the engine."""

    name: str
    workload: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


RUNS: tuple[Run, ...] = (
    Run(name="device", workload="128:32x64", arguments={**_WIDE, **_POOL, "admission": "reserve"}),
    Run(name="device, few at once", workload="tail:96", arguments={**_NARROW, **_POOL, "admission": "reserve"}),
    Run(name="device, forecast", workload="tail:96", arguments={**_WIDE, **_SMALL, "admission": "forecast"}),
    Run(name="device, two pages", workload="64:96x48", arguments={**_WIDE, **_SMALL, "admission": "two-page"}),
    Run(name="prompts mixed into steps", workload="tail:96", arguments={**_NARROW, **_POOL, "mix_prefill": 64}),
    Run(
        name="store, resident",
        workload="128:48x48",
        arguments={**_WIDE, **_SMALL, **_STORE, "kv_store_mode": "inclusive", "decode_kv": "resident"},
    ),
    Run(
        name="store, streamed",
        workload="128:48x48",
        arguments={**_WIDE, **_SMALL, **_STORE, "kv_store_mode": "inclusive", "decode_kv": "streamed"},
    ),
    Run(
        name="store, exclusive",
        workload="128:48x48",
        arguments={**_WIDE, **_SMALL, **_STORE, "kv_store_mode": "exclusive", "decode_kv": "resident"},
    ),
    Run(name="two ranks", workload="tail:96", arguments={**_WIDE, **_POOL, **_RANKS, "admission": "reserve"}),
    Run(
        name="two ranks, store",
        workload="trace:24",
        arguments={**_WIDE, **_POOL, **_STORE, **_RANKS, "kv_store_mode": "inclusive", "decode_kv": "resident"},
    ),
)
"""The runs, named before any of them was simulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run took, and the events of its trace without those before its batch."""

    seconds: float
    events: Sequence[Mapping[str, Any]]


def measure(model: Path, run: Run, trace: Path | None) -> Measured:
    """Run a batch in a new engine that has answered two short prompts, and return its recorded events."""
    from sgl_batch import Engine

    config = model_config(model)
    workload = workload_of(run.workload, trace, int(config["max_position_embeddings"]))
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "trace.jsonl")
        engine = Engine(model_path=str(model), log_level="error", trace_file=str(file), **run.arguments)
        try:
            engine.generate(input_ids=[[9] * 8, [8] * 9], sampling_params={"max_new_tokens": 4, "temperature": 0})
            begins = file.stat().st_size
            seconds = batch_seconds(engine, workload, random.Random(7), int(config["vocab_size"]))
        finally:
            engine.shutdown()
        with file.open("rb") as recorded:
            recorded.seek(begins)
            events = [json.loads(line) for line in recorded]
    return Measured(seconds=seconds, events=events)


class Simulator:
    """Simulates recorded runs with the profile that is kept."""

    def __init__(self, model: Path, file: Path | None) -> None:
        self._profile, self._layers = kept_profile(model, file)
        self._fitted = fit(self._profile, self._layers)

    def simulate(self, run: Run, recorded: RecordedRun) -> Account:
        """Return the account of the same sequences in modelled time."""
        ranks = len(recorded.of_rank)
        costs = MachineCosts(
            passes=self._passes(recorded, INCLUSIVE if recorded.memory.store else DEVICE),
            streamed=self._passes(recorded, STREAMED) if recorded.form.startswith("streamed") else None,
            ranks=ranks,
        )
        name = str(run.arguments.get("admission", "auto"))
        exclusive = recorded.form.startswith(EXCLUSIVE)
        policies = {rank: make_admission(name, on_cpu=True, exclusive_store=exclusive) for rank in range(ranks)}
        return simulated(recorded, costs, policies).run()

    def _passes(self, recorded: RecordedRun, kv: str) -> PassCost:
        prefill, decode = recorded.plan.prefill, recorded.plan.decode
        candidate = Candidate(
            b_attn_prefill=prefill.b_attn,
            b_moe_prefill=prefill.b_moe,
            b_attn_decode=decode.b_attn,
            b_moe_decode=decode.b_moe,
            accumulate=False if decode.yield_option == FUSED else None,
            kv=kv,
        )
        return PassCost(self._fitted, self._layers, candidate, cores=int(self._profile.machine["cores"]))


def draw(target: Path, drawn: Sequence[tuple[str, Measured, Account]]) -> None:
    """Draw the running sequences of all runs over time, measured and simulated."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    columns = 2
    figure, panels = plt.subplots(-(-len(drawn) // columns), columns, figsize=(10, 11), layout="constrained")
    for panel, (name, measured, account) in zip(panels.flat, drawn, strict=False):
        times, counts = running_over_time(measured.events)
        panel.step(times, counts, where="post", label="measured", linewidth=1)
        line = account.timeline
        modelled = [running / line.bin_s for running in line.running]
        panel.step([index * line.bin_s for index in range(len(modelled))], modelled, where="post", label="simulated")
        panel.set_title(f"{name}: {measured.seconds:.1f} s, simulated {account.seconds:.1f} s", fontsize=9)
        panel.set_ylabel("running")
    panels.flat[0].legend()
    panels.flat[-1].set_xlabel("seconds")
    figure.savefig(target, dpi=110)


def main(argv: Sequence[str]) -> int:
    """Measure, replay and simulate all runs; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the model's directory")
    parser.add_argument("--trace", type=Path, help="the Azure trace of LLM inference, for one of the runs")
    parser.add_argument("--profile-file", type=Path, help="(the one in the user's cache)")
    parser.add_argument("--only", default="", metavar="TEXT", help="runs whose name has it (all)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the running sequences over time")
    args = parser.parse_args(argv)
    simulator, rows, errors, drawn = Simulator(args.model, args.profile_file), [], [], []
    for run in (one for one in RUNS if args.only in one.name):
        measured = measure(args.model, run, args.trace)
        decisions, differences = replay_trace(measured.events)
        account = simulator.simulate(run, read_run(measured.events))
        errors.append(abs(account.seconds / measured.seconds - 1))
        drawn.append((run.name, measured, account))
        say(f"{run.name}: {measured.seconds:.2f} s, simulated {account.seconds:.2f} s, {len(differences)} differ")
        replayed = f"{decisions - len(differences)} of {decisions}"
        error = f"{account.seconds / measured.seconds - 1:+.0%}"
        rows.append([run.name, run.workload, replayed, f"{measured.seconds:.1f}", f"{account.seconds:.1f}", error])
    if not rows:
        raise ConfigError(f"no run's name has {args.only!r}; they are {', '.join(run.name for run in RUNS)}")
    print(table(["run", "workload", "decisions replayed", "measured s", "simulated s", "error"], rows))
    print(f"\nErrors without sign: median {statistics.median(errors):.0%}, largest {max(errors):.0%}.")
    if args.picture:
        draw(args.picture, drawn)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("simulated_runs.py", lambda: main(sys.argv[1:])))
