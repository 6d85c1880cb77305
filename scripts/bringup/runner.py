"""Owns the order of a bring-up: which stages run, within which time, and the outcome of each."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bringup import processes
from bringup.stages import ROOT, Runs, Stage, result_of
from bringup.state import FAILED, NOT_RUN, OK, Outcome, StateFile
from bringup.table import table


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The settings of a call. `here`: the kinds of stages that can run here; `lacking`: why the others cannot.

    `only`: these alone, whatever became of them before, with what they need; empty for all. `again`: failed ones, too.
    """

    here: Collection[Runs]
    lacking: str
    only: Collection[str] = ()
    again: bool = False
    seconds: float | None = None


class Bringup:
    """One call of the command. `environment`: of the stages' processes; `say` takes a line for the terminal.

    `grace_s`: between a process's being asked to end and its being killed.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        folder: Path,
        wanted: Wanted,
        *,
        environment: Mapping[str, str],
        say: Callable[[str], None],
        grace_s: float = processes.GRACE_S,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._stages, self._folder, self._wanted = stages, folder, wanted
        self._environment, self._say, self._grace_s = environment, say, grace_s
        self.state = StateFile(folder / "state.json")
        self._began = time.monotonic()

    def run(self) -> bool:
        """Run the stages to be run; return whether no stage, now or before, has failed."""
        names = self._chosen()
        chosen = [stage for stage in self._stages if stage.name in names]
        for number, stage in enumerate(chosen, 1):
            obstacle = self._obstacle(stage)
            if obstacle is not None:
                if self.state.get(stage.name).state == NOT_RUN:
                    self._keep(stage, Outcome(remark=obstacle))
                continue
            limit_s = self._limit_s(stage)
            self._say(f"[{number}/{len(chosen)}] {stage.name}: {stage.what} (at most {limit_s:.0f} s)")
            self._keep(stage, Outcome(remark="was under way when the bring-up ended"))
            outcome = self._outcome(stage, limit_s)
            self._keep(stage, outcome)
            said = f"{outcome.state} in {outcome.seconds:.0f} s", outcome.tokens, outcome.remark[:200]
            self._say(f"    {'; '.join(filter(None, said))}")
        self._write_table()
        return all(self.state.get(stage.name).state != FAILED for stage in self._stages)

    def table(self) -> str:
        """Return all stages and their outcomes."""
        return table([stage.name for stage in self._stages], self.state.outcomes)

    def _chosen(self) -> set[str]:
        """Return the stages to run: those not yet done, or the named ones with the stages that they still need."""
        done = {OK} if self._wanted.again else {OK, FAILED}
        if not self._wanted.only:
            return {stage.name for stage in self._stages if self.state.get(stage.name).state not in done}
        names = set(self._wanted.only)
        for stage in reversed(self._stages):
            if stage.name in names:
                names |= {need for need in stage.needs if self.state.get(need).state != OK}
        return names

    def _obstacle(self, stage: Stage) -> str | None:
        """Return why a stage cannot run now."""
        if stage.runs not in self._wanted.here:
            return self._wanted.lacking
        for need in stage.needs:
            if self.state.get(need).state != OK:
                return f"needs {need}, which is {self.state.get(need).state}"
        left = self._left_s()
        if left is not None and left < stage.expected_s:
            return f"no time: {max(0.0, left):.0f} s of --minutes are left, and it may take {stage.expected_s:.0f}"
        return None

    def _left_s(self) -> float | None:
        seconds = self._wanted.seconds
        return None if seconds is None else seconds - (time.monotonic() - self._began)

    def _limit_s(self, stage: Stage) -> float:
        left = self._left_s()
        return stage.limit_s if left is None else min(stage.limit_s, left)

    def _outcome(self, stage: Stage, limit_s: float) -> Outcome:
        """Run the stage's process, and read its result."""
        log, result = self._folder / f"{stage.name}.log", result_of(self._folder, stage.name)
        result.unlink(missing_ok=True)
        ended = processes.run(
            stage.argv, log, limit_s=limit_s, environment=self._environment, directory=ROOT, grace_s=self._grace_s
        )
        found = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
        state, remark = OK, found.get("remark", "")
        if ended.code is None and limit_s < stage.limit_s:
            state, remark = NOT_RUN, f"cut off after {limit_s:.0f} s, the end of --minutes"
        elif ended.code is None:
            state, remark = FAILED, f"killed after {limit_s:g} s; see {log.name}"
        elif ended.code != 0:
            state, remark = FAILED, found.get("error") or processes.last_error(log, ended.code)
        return Outcome(state=state, seconds=ended.seconds, tokens=found.get("tokens", ""), remark=remark)

    def _keep(self, stage: Stage, outcome: Outcome) -> None:
        self.state.set(stage.name, outcome)
        self._write_table()

    def _write_table(self) -> None:
        (self._folder / "table.txt").write_text(self.table() + "\n", encoding="utf-8")
