"""Owns the order of a measurement of ranks: cases one after another, round by round, each in a fresh process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comparison.child import run_child
from comparison.figures import remaining_s
from comparison.workload import Workload

from several_ranks.figures import Run
from sgl_batch.core.answers import EngineStats
from sgl_batch.distributed.rank_cores import read_cpus, share_of
from sgl_batch.errors import EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measured case of each round. `cores`: of a single rank; several ranks take their shares themselves."""

    name: str
    model: Path
    engine: dict[str, Any]
    num_ranks: int
    cores: list[int] | None = None


@dataclass(slots=True, kw_only=True)
class Comparison:
    """One workload in several cases; `rounds` has a run of each case by name."""

    name: str
    workload: Workload
    cases: list[Case]
    rounds: list[dict[str, Run]] = field(default_factory=list)

    @property
    def whole_rounds(self) -> list[dict[str, Run]]:
        """Return the complete rounds."""
        return [done for done in self.rounds if len(done) == len(self.cases)]


def kinds_of_ranks(num_ranks: int, settings: dict[str, Any], model: Path) -> list[Case]:
    """Return the cases: with migration, without, and one rank on one rank's share of the cores and on all cores.

    The last says what the cores can do together, which is less than what one of them does alone times their number
    where they share a memory.
    """
    sizes = dict.fromkeys(("tp_size", "dp_size", "ep_size"), num_ranks)
    several = {**settings, **sizes, "enable_dp_attention": True, "rank_timeout_s": 60.0}
    own = share_of(read_cpus(os.sched_getaffinity(0)), 0, num_ranks)
    return [
        Case(name="migration", model=model, engine={**several, "migration": "even"}, num_ranks=num_ranks),
        Case(name="no migration", model=model, engine={**several, "migration": "never"}, num_ranks=num_ranks),
        Case(name="one rank", model=model, engine=settings, num_ranks=1, cores=own),
        Case(name="one rank, all cores", model=model, engine=settings, num_ranks=1),
    ]


def run_all(
    comparisons: list[Comparison], rounds: int, out: Path, timeout_s: float, say: Callable[[str], None]
) -> None:
    """Run every case `rounds` times, and add the runs to the comparisons. Raises EngineError."""
    todo = list(_in_order(comparisons, rounds))
    took: dict[str, list[float]] = {}
    for number, (comparison, round_number, case) in enumerate(todo):
        left = remaining_s([_kind(*later) for later in todo[number:]], took)
        eta = "" if left is None else f"; about {left / 60:.1f} min to go"
        where = f"{comparison.name}, round {round_number}/{rounds}, {case.name}"
        say(f"{number + 1}/{len(todo)} {where}: started{eta}")
        if round_number > len(comparison.rounds):
            comparison.rounds.append({})
        stem = out / f"{comparison.name}-{round_number}-{case.name.replace(', ', '-').replace(' ', '-')}"
        run, seconds = run_case(case, comparison.workload, stem, timeout_s)
        comparison.rounds[-1][case.name] = run
        took.setdefault(_kind(comparison, round_number, case), []).append(seconds)
        say(f"{number + 1}/{len(todo)} {where}: {run.seconds:.1f} s")


def _in_order(comparisons: list[Comparison], rounds: int) -> Iterator[tuple[Comparison, int, Case]]:
    for comparison in comparisons:
        for number in range(1, rounds + 1):
            for case in comparison.cases:
                yield comparison, number, case


def _kind(comparison: Comparison, _: int, case: Case) -> str:
    return f"{comparison.name} {case.name}"


def run_case(case: Case, workload: Workload, stem: Path, timeout_s: float) -> tuple[Run, float]:
    """Run a case; return the run and its seconds with start and end. Raises EngineError, which names the log."""
    spec, result, log = (stem.with_name(f"{stem.name}{suffix}") for suffix in (".spec.json", ".result.json", ".log"))
    asked = {"model": str(case.model), "engine": case.engine, "cores": case.cores}
    asked |= {"prompts": workload.prompts, "output_lens": workload.output_lens}
    spec.write_text(json.dumps(asked), encoding="utf-8")
    threads = None if case.cores is None else len(case.cores)
    end = run_child(sys.executable, spec, result, log, limit_s=timeout_s, threads=threads, runner="run_ranks.py")
    spec.unlink()
    if end.reason is not None:
        raise EngineError(f"{stem.name}: {end.reason}; its messages are in {log}")
    found = json.loads(result.read_text(encoding="utf-8"))
    return as_run(found, peak_rss_bytes=end.peak_rss_bytes, cpus_of_others=end.cpus_of_others), end.took_s


def as_run(found: dict[str, Any], *, peak_rss_bytes: int, cpus_of_others: float) -> Run:
    """Read a run from its process's result."""
    return Run(
        seconds=found["seconds"],
        longest_alone_s=found["longest_alone_s"],
        ranks=tuple(EngineStats(**rank) for rank in found["ranks"]),
        active=tuple((moment, tuple(rows)) for moment, rows in found["active"]),
        outputs=found["outputs"],
        cores=tuple(tuple(cores) for cores in found["cores"]),
        peak_rss_bytes=peak_rss_bytes,
        cpus_of_others=cpus_of_others,
    )
