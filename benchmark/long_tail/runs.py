"""Owns running a case of the long tail, each engine in a fresh process, and measuring the rates of the cores."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comparison.child import ChildEnd, measured_by_child, run_child
from several_ranks.figures import num_moved

from long_tail.bars import Rates
from long_tail.cases import Case, dealt
from sgl_batch.core.answers import EngineStats
from sgl_batch.distributed.rank_cores import read_cpus, share_of
from sgl_batch.errors import EngineError
from sgl_batch.profiler.other_load import busy_s

_BENCHMARK = Path(__file__).resolve().parent.parent
_SAMPLE_S = 0.25
_LOOK_S = 0.02
_RATES_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRun:
    """One rank's part of a run.

    Attributes:
        cores: That it ran on.
        idle: The share of its time that it waited for requests or other ranks.
        part_s: Seconds by part.
        counters: Those of the rank.
        samples: Of its waits over time: seconds since the begin, and the share since the last sample.
    """

    cores: list[int]
    idle: float
    part_s: dict[str, float]
    counters: dict[str, float]
    samples: list[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run of a case.

    Attributes:
        round: Its number.
        case: Its name.
        seconds: Of the engine that took longest; starts and warm-ups are not in it.
        engine_s: Of each engine.
        took_s: With starts and ends.
        ranks: Of all engines.
        moves: How often a sequence changed its rank.
        outputs: A digest of each sequence's tokens.
        cpus_of_others: How many cores other programs kept busy meanwhile.
    """

    round: int
    case: str
    seconds: float
    engine_s: list[float]
    took_s: float
    ranks: list[RankRun]
    moves: int
    outputs: list[str]
    cpus_of_others: float

    def count(self, name: str) -> float:
        """Return a counter of all ranks together."""
        return sum(rank.counters.get(name, 0.0) for rank in self.ranks)

    @property
    def tokens_a_pass(self) -> float:
        """Return the tokens that a decode pass gave a sequence on average: more than 1 where drafts were right."""
        rows = self.count("decode_rows") - self.count("drafts")
        return 1.0 + self.count("drafts_accepted") / max(rows, 1.0)


def shares(num_ranks: int) -> list[list[int]]:
    """Return the cores of each rank."""
    cpus = read_cpus(os.sched_getaffinity(0))
    return [share_of(cpus, rank, num_ranks) for rank in range(num_ranks)]


def run_case(case: Case, model: Path, stem: Path, number: int, num_ranks: int, timeout_s: float) -> Run:
    """Run a case in round `number`; `stem` begins the names of its files. Raises EngineError, which names the log."""
    parts = dealt(case.work, case.engines)
    gate = stem.with_name(f"{stem.name}.gate")
    specs = [_spec(case, model, part, gate) for part in parts]
    if case.ranks == 1:
        for spec, cores in zip(specs, shares(num_ranks), strict=False):
            spec["cores"] = cores
    stems = [stem.with_name(f"{stem.name}-{index}") for index in range(len(parts))]
    begun, busy = time.monotonic(), busy_s()
    ends = _at_once(specs, stems, gate, timeout_s)
    took_s, busy = time.monotonic() - begun, busy_s() - busy
    for own, end in zip(stems, ends, strict=True):
        if end.reason is not None:
            raise EngineError(f"{case.name}: {end.reason}; its messages are in {own}.log")
    found = [json.loads(Path(f"{own}.result.json").read_text(encoding="utf-8")) for own in stems]
    outputs = [""] * len(case.work.prompts)
    for part, one in zip(parts, found, strict=True):
        for sequence, digest in zip(part, one["by_sequence"], strict=True):
            outputs[sequence] = digest
    # Each engine counts those beside it as other programs.
    others = sum(end.cpus_of_others * end.took_s for end in ends) - (len(ends) - 1) * busy
    return Run(
        round=number,
        case=case.name,
        seconds=max(one["seconds"] for one in found),
        engine_s=[one["seconds"] for one in found],
        took_s=took_s,
        ranks=[rank for one in found for rank in rank_runs(one)],
        moves=num_moved([EngineStats(**rank) for one in found for rank in one["ranks"]]),
        outputs=outputs,
        cpus_of_others=max(0.0, others) / took_s,
    )


def _spec(case: Case, model: Path, part: Sequence[int], gate: Path) -> dict[str, Any]:
    """Return what one engine is told, which runs a part of the sequences."""
    work = case.work
    return {
        "model": str(model),
        "engine": dict(case.options),
        "cores": None,
        "prompts": [work.prompts[number] for number in part],
        "output_lens": [work.output_lens[number] for number in part],
        "longest_alone": False,
        "sample_s": _SAMPLE_S,
        "gate": str(gate),
    }


def _at_once(specs: Sequence[dict[str, Any]], stems: Sequence[Path], gate: Path, timeout_s: float) -> list[ChildEnd]:
    """Run engines at once; their workloads begin together."""
    gate.unlink(missing_ok=True)
    signs = [Path(f"{own}.ready") for own in stems]
    for sign, spec in zip(signs, specs, strict=True):
        sign.unlink(missing_ok=True)
        spec["ready"] = str(sign)
    try:
        with ThreadPoolExecutor(len(specs)) as pool:
            try:
                running = [
                    pool.submit(_run_engine, spec, own, timeout_s) for spec, own in zip(specs, stems, strict=True)
                ]
                while not all(sign.exists() or one.done() for sign, one in zip(signs, running, strict=True)):
                    time.sleep(_LOOK_S)
            finally:
                gate.touch()  # none waits for one that has failed
            return [one.result() for one in running]
    finally:
        for file in (gate, *signs):
            file.unlink(missing_ok=True)


def _run_engine(spec: Mapping[str, Any], stem: Path, timeout_s: float) -> ChildEnd:
    asked, result, log = (Path(f"{stem}.{kind}") for kind in ("spec.json", "result.json", "log"))
    asked.write_text(json.dumps(spec), encoding="utf-8")
    known = os.environ.get("PYTHONPATH")
    try:
        return run_child(
            sys.executable,
            asked,
            result,
            log,
            limit_s=timeout_s,
            threads=None if spec["cores"] is None else len(spec["cores"]),
            runner="run_ranks.py",
            environment={"PYTHONPATH": f"{_BENCHMARK}{os.pathsep}{known}" if known else str(_BENCHMARK)},
        )
    finally:
        asked.unlink()


def rank_runs(found: Mapping[str, Any]) -> list[RankRun]:
    """Return the ranks of one engine from its process's result."""
    made = []
    for number, rank in enumerate(EngineStats(**rank) for rank in found["ranks"]):
        cores = found["cores"]
        made.append(
            RankRun(
                cores=cores[number] if number < len(cores) else [],
                idle=rank.waiting_share,
                part_s=dict(rank.part_s),
                counters=dict(rank.counters),
                samples=[(moment, of_ranks[number]) for moment, of_ranks in found["waiting"]],
            )
        )
    return made


def measure_rates(out: Path, number: int, num_ranks: int) -> Rates:
    """Measure the rates of the cores in round `number`. Raises EngineError."""
    found, fault = measured_by_child(
        f"{number}-rates",
        {"cores": shares(num_ranks)},
        out,
        runner="shared_rates.py",
        limit_s=_RATES_LIMIT_S,
        threads=None,
    )
    if fault is not None:
        raise EngineError(f"the rates of the cores could not be measured: {fault}")
    return Rates(round=number, read=_pair(found["read"]), products=_pair(found["products"]))


def _pair(values: Sequence[float]) -> tuple[float, float]:
    alone, together = values
    return alone, together


def by_round(runs: Sequence[Run]) -> dict[str, dict[int, float]]:
    """Return the seconds of each case, by round."""
    found: dict[str, dict[int, float]] = {}
    for run in runs:
        found.setdefault(run.case, {})[run.round] = run.seconds
    return found


def tokens_a_pass(runs: Sequence[Run]) -> dict[str, float]:
    """Return the median over the rounds of the tokens a pass, by case."""
    found: dict[str, list[float]] = {}
    for run in runs:
        found.setdefault(run.case, []).append(run.tokens_a_pass)
    return {name: statistics.median(values) for name, values in found.items()}
