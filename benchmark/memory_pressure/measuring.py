"""Owns the rounds of memory pressure: the same sequences through each case in turn, each in a fresh process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comparison.child import run_child, this_python
from comparison.figures import length_fault, remaining_s
from comparison.workload import Workload
from runners.run_round import warm_up_of

from memory_pressure.stock_log import read_retractions
from sgl_batch.errors import EngineError

STREAMED, STORE, NO_STORE = "host store, decode streamed", "host store, decode resident", "no store"
STOCK, ROOMY = "stock SGLang", "all on the device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An engine of run_round.py and its constructor's arguments."""

    name: str
    engine: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One case of one round. `interrupted`: how often sequences were suspended or retracted."""

    seconds: float
    interrupted: int
    recomputed_tokens: int
    peak_rss_bytes: int
    cpus_of_others: float
    part_s: dict[str, float]
    counters: dict[str, int]
    outputs: list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """The settings: a device for `pool_tokens` of the `need_tokens` that all sequences have together."""

    model: Path
    workload: Workload
    pool_tokens: int
    need_tokens: int
    cases: tuple[Case, ...]
    out: Path
    timeout_s: float


def cases_of(*, pool_tokens: int, need_tokens: int, store_bytes: int, ours: dict[str, Any]) -> tuple[Case, ...]:
    """Return the cases: ours with a store (both decode modes), ours without, stock, and ours with all memory."""
    pool = {"max_total_tokens": pool_tokens}
    # With its default radix cache: without it, stock reserves whole outputs for requests that ignore the end token, as
    # a benchmark's requests do and a batch's do not.
    stock = {**pool, "log_level": "info"}
    store = {**ours, **pool, "kv_store_bytes": store_bytes}
    return (
        Case(name=STREAMED, engine="sgl_batch", arguments={**store, "decode_kv": "streamed"}),
        Case(name=STORE, engine="sgl_batch", arguments={**store, "decode_kv": "resident"}),
        Case(name=NO_STORE, engine="sgl_batch", arguments={**ours, **pool}),
        Case(name=STOCK, engine="stock", arguments=stock),
        Case(name=ROOMY, engine="sgl_batch", arguments={**ours, "max_total_tokens": need_tokens}),
    )


def run_rounds(pressure: Pressure, rounds: int, say: Callable[[str], None], found: list[dict[str, Run]]) -> None:
    """Add the runs of each round to `found`; every second round has the reverse order. Raises EngineError."""
    took: dict[str, list[float]] = {}
    orders = [pressure.cases[:: 1 if number % 2 == 0 else -1] for number in range(rounds)]
    todo = [(number, case) for number, order in enumerate(orders) for case in order]
    for done, (number, case) in enumerate(todo):
        left = remaining_s([later.name for _, later in todo[done:]], took)
        eta = "" if left is None else f"; about {left / 60:.1f} min to go"
        say(f"round {number + 1}/{rounds}, {case.name}: started{eta}")
        if number == len(found):
            found.append({})
        run, seconds = _run(pressure, case, f"{number + 1}-{case.name.replace(',', '').replace(' ', '-')}")
        found[number][case.name] = run
        took.setdefault(case.name, []).append(seconds)
        say(f"round {number + 1}/{rounds}, {case.name}: {run.seconds:.1f} s")


def _run(pressure: Pressure, case: Case, stem: str) -> tuple[Run, float]:
    spec, result, log = (pressure.out / f"{stem}.{kind}" for kind in ("spec.json", "result.json", "log"))
    workload = pressure.workload
    asked = {"engine": case.engine, "model": str(pressure.model), "dtype": "bfloat16", "arguments": case.arguments}
    asked |= {"prompts": workload.prompts, "output_lens": workload.output_lens}
    spec.write_text(json.dumps(asked), encoding="utf-8")
    end = run_child(this_python(), spec, result, log, limit_s=pressure.timeout_s, threads=None)
    spec.unlink()
    done = {} if end.reason else json.loads(result.read_text(encoding="utf-8"))
    reason = end.reason or length_fault(done["outputs"], workload.output_lens)
    if reason is not None:
        raise EngineError(f"{stem}: {reason}; its messages are in {log}")
    text = log.read_text(encoding="utf-8", errors="replace")
    run = as_run(done, workload, text, peak_rss_bytes=end.peak_rss_bytes, cpus_of_others=end.cpus_of_others)
    return run, end.took_s


def as_run(done: dict[str, Any], workload: Workload, log: str, *, peak_rss_bytes: int, cpus_of_others: float) -> Run:
    """Read a run's result: our engine counts itself, and stock's log is read."""
    before, after = done["details_before"], done["details_after"]
    parts, counters = {}, {}
    if after:
        parts = {name: value - before["part_s"][name] for name, value in after["part_s"].items()}
        counters = {name: value - before["counters"].get(name, 0) for name, value in after["counters"].items()}
        interrupted = counters.get("suspensions", 0)
        recomputed = counters["recomputed_tokens_planned"] + counters["recomputed_tokens_unplanned"]
    else:
        warm_up = sum(map(len, warm_up_of(workload.prompts)))
        retractions = read_retractions(log, prompt_tokens=workload.prompt_tokens + warm_up)
        interrupted, recomputed = retractions.sequences, retractions.tokens
    return Run(
        seconds=done["wall_s"],
        interrupted=interrupted,
        recomputed_tokens=recomputed,
        peak_rss_bytes=peak_rss_bytes,
        cpus_of_others=cpus_of_others,
        part_s=parts,
        counters=counters,
        outputs=done["outputs"],
    )
