"""Owns the order of a run: which engine is visited when, each in a fresh process, within the time limit.

The first round visits the first of ours that runs and every peer; later ones visit ours and the fastest peer, by turns
of order. Then the rest of ours and references are visited once, and an engine is asked which experts all these tokens
chose. A visit for which the time that it took before would not suffice is left out, and the report says so.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from comparison.child import ChildEnd, run_child, this_python
from comparison.figures import remaining_s
from runners.gpu_round import num_passes

from gpu_comparison.cases import Case, Regime, Role, Settings
from gpu_comparison.found import Found, Visit, compared, figures_of
from gpu_comparison.routing import Distinct, replayed_rows

LEAST_VISIT_S = 20.0  # no engine starts and answers in less
TEMPERATURE = 1.0


class Run:
    """One run of a regime. `changed` is called when `found` has something new; `clock` gives seconds."""

    def __init__(
        self,
        regime: Regime,
        settings: Settings,
        found: Found,
        *,
        say: Callable[[str], None],
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._regime, self._settings, self._found = regime, settings, found
        self._say, self._changed, self._clock = say, changed, clock
        self._began = clock()
        self._took: dict[str, list[float]] = {}

    def all(self) -> None:
        """Run every round, the references, the routing, and then the profile."""
        for case in self._regime.of_role(Role.OURS):
            self._round(1, [case])
            if self._found.ran(case.name):
                break
        self._round(1, self._regime.of_role(Role.PEER))
        for number in range(2, self._settings.rounds + 1):
            pair = [case for case in compared(self._regime, self._found) if case is not None]
            self._round(number, pair if number % 2 else pair[::-1], kept_s=self._shortest_s)
        met = {visit.case for visit in self._found.visits}
        self._round(1, [case for case in self._regime.cases if case.name not in met], kept_s=self._shortest_s)
        self._ask_routing()
        if self._settings.profile_steps:
            self._profile()

    @property
    def _shortest_s(self) -> float:
        return min((min(took) for took in self._took.values()), default=LEAST_VISIT_S)

    def _round(self, number: int, cases: Sequence[Case], *, kept_s: float = 0.0) -> None:
        """Visit these cases. `kept_s`: seconds that must be left for the routing after them."""
        for index, case in enumerate(cases):
            if case.lacking is not None:
                self._add(Visit(case=case.name, round=number, fault=case.lacking))
                continue
            left = self._left_s
            if self._estimate(case) + kept_s > left:
                fault = f"not run in round {number}: {max(left, 0):.0f} s were left (--minutes)"
                self._add(Visit(case=case.name, round=number, fault=fault))
                continue
            self._say(f"round {number}/{self._settings.rounds}, {case.name}: started{self._eta(number, cases[index:])}")
            visit = self._visit(case, number)
            self._took.setdefault(case.name, []).append(visit.took_s)
            self._add(visit)

    def _add(self, visit: Visit) -> None:
        self._found.visits.append(visit)
        outcome = visit.fault or f"{visit.wall_s:.1f} s after {visit.start_s:.0f} s of start-up"
        self._say(f"round {visit.round}/{self._settings.rounds}, {visit.case}: {outcome}")
        self._changed()

    @property
    def _left_s(self) -> float:
        return self._settings.until_s - (self._clock() - self._began)

    def _estimate(self, case: Case) -> float:
        """Estimate the seconds of a visit from this case's time or, before its first one, the shortest other case's."""
        took = self._took.get(case.name)
        return min(took) if took else self._shortest_s

    def _eta(self, number: int, coming: Sequence[Case]) -> str:
        later = 2 * (self._settings.rounds - number)
        names = [case.name for case in coming if case.lacking is None] + ["of later rounds"] * later
        left = remaining_s(names, self._took)
        if left is None:
            return f"; {self._left_s / 60:.1f} min are left"
        return f"; about {left / 60:.1f} min to go, {self._left_s / 60:.1f} are left"

    def _visit(self, case: Case, number: int, profile: dict[str, Any] | None = None) -> Visit:
        spec, result, log = self._files(case, number)
        workload = self._regime.workload
        asked = {
            "engine": case.engine,
            "model": str(self._settings.model),
            "dtype": "bfloat16",
            "arguments": case.arguments,
            "sampling": {"temperature": TEMPERATURE},
            "prompts": workload.prompts,
            "output_lens": workload.output_lens,
            "profile": profile,
        }
        spec.write_text(json.dumps(asked), encoding="utf-8")
        end = self._child("gpu_round.py", spec, result, log)
        spec.unlink()
        common: dict[str, Any] = {"case": case.name, "round": number, "took_s": end.took_s}
        if end.reason is not None:
            return Visit(**common, fault=f"failed in round {number}: {end.reason} ({last_line(log)})")
        done = json.loads(result.read_text(encoding="utf-8"))
        if done["num_output_tokens"] != workload.output_lens:
            fault = f"failed in round {number}: not every prompt has the output tokens that were asked for"
            return Visit(**common, fault=fault)
        figures = figures_of(done, workload, log.read_text(encoding="utf-8", errors="replace"))
        return Visit(**common, **figures, peak_rss_bytes=end.peak_rss_bytes, cpus_of_others=end.cpus_of_others)

    def _files(self, case: Case, number: int) -> tuple[Path, Path, Path]:
        """Return the files of a visit: its request, its result, and its log."""
        name = f"{number}-{''.join(c if c.isalnum() else '-' for c in case.name)}"
        out = self._settings.out
        return out / f"{name}.spec.json", out / f"{name}.result.json", out / f"{name}.log"

    def _child(self, runner: str, spec: Path, result: Path, log: Path) -> ChildEnd:
        return run_child(
            this_python(),
            spec,
            result,
            log,
            limit_s=max(1.0, min(self._settings.limit_s, self._left_s)),
            threads=None,
            runner=runner,
            environment=self._settings.environment,
        )

    def _ask_routing(self) -> None:
        """Find the experts that the tokens of every case's first visit chose."""
        found, case, shape = self._found, self._settings.routing, self._regime.shape
        ran = [one for one in self._regime.cases if found.ran(one.name)]
        if not ran:
            found.routing_fault = "no case has run"
        elif self._shortest_s > self._left_s:
            found.routing_fault = f"{max(self._left_s, 0):.0f} s were left (--minutes)"
        else:
            workload = self._regime.workload
            rows = replayed_rows(workload.prompts, max(workload.output_lens), len(ran))
            self._say(f"distinct experts of {len(ran)} cases, {rows} sequences each: started")
            spec, result, log = self._files(case, 0)
            outputs = {one.name: self._outputs(one)[:rows] for one in ran}
            asked = {
                "engine": case.engine,
                "model": str(self._settings.model),
                "dtype": "bfloat16",
                "arguments": case.arguments,
                "prompts": workload.prompts[:rows],
                "outputs": outputs,
                "rows": {one.name: self._rows(one, rows) for one in ran},
                "layers": shape.layers,
                "top_k": shape.top_k,
            }
            spec.write_text(json.dumps(asked), encoding="utf-8")
            end = self._child("routing_round.py", spec, result, log)
            spec.unlink()
            if end.reason is not None:
                found.routing_fault = f"{end.reason} ({last_line(log)})"
            else:
                counted = json.loads(result.read_text(encoding="utf-8"))
                found.distinct = {name: Distinct(**value) for name, value in counted.items()}
        self._say(f"distinct experts: {found.routing_fault or 'counted'}")
        self._changed()

    def _rows(self, case: Case, most: int) -> int:
        """Return the sequences of a case's expert call, or `most` if that is unknown."""
        ran = self._found.ran(case.name)
        said = ran[min(ran)].decode_rows
        return most if said is None else max(1, min(most, round(case.expert_rows(said))))

    def _outputs(self, case: Case) -> list[list[int]]:
        result = self._files(case, min(self._found.ran(case.name)))[1]
        outputs: list[list[int]] = json.loads(result.read_text(encoding="utf-8"))["some_outputs"]
        return outputs

    def _profile(self) -> None:
        """Visit our case once more for a trace of passes from its middle; its time does not count."""
        case, found = compared(self._regime, self._found)[0], self._found
        if case is None or self._estimate(case) > self._left_s:
            found.profile_fault = "none of ours has run" if case is None else "no time was left for it (--minutes)"
        else:
            directory = self._settings.out / "profile"
            visits = found.ran(case.name)
            passes = num_passes(visits[min(visits)].counters)
            self._say(f"profile of {case.name}: started")
            asked = {
                "directory": str(directory),
                "num_steps": self._settings.profile_steps,
                "skip_steps": passes // 2,
            }
            visit = self._visit(case, 0, asked)
            found.traces = sorted(directory.glob("*.trace.json.gz"))
            if not found.traces:
                found.profile_fault = visit.fault or "SGLang's profiler wrote no trace"
        self._say(found.profile_fault or f"profile: {', '.join(map(str, found.traces))}")
        self._changed()


def last_line(log: Path) -> str:
    """Return the last non-empty line of a log."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"last line of {log.name}: {lines[-1][:200]}" if lines else f"{log.name} is empty"
