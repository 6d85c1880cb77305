"""Runs a file of requests by `sgl-batch run`: on instances, or on engines that know nothing of each other."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from several_instances.engines import Samples, kill_last, slowed, watched
from sgl_batch.errors import ConfigError

_LOOK_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A way to run the batch.

    Attributes:
        name: For people.
        instances: Of one run; 0 for engines of their own, `separate` of them at once, each with its part of the lines.
        separate: See above.
        ahead: The most lines that an instance has at a time; None for the default.
        slowed: Whether one engine stands still for half of the time.
        killed_at: The part of the lines after which one engine is killed; None for no kill.
    """

    name: str
    instances: int = 0
    separate: int = 1
    ahead: int | None = None
    slowed: bool = False
    killed_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one command computed.

    Attributes:
        start_s: Up to the first line: the start of its engine, or of the first of its instances.
        wall_s: From there to its end.
        prompt_tokens: That its engines have computed, those of killed ones as far as they had said so.
        prefill_s: Of all engines together.
    """

    start_s: float
    wall_s: float
    prompt_tokens: float
    prefill_s: float


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a run took. `seconds`: without the start of engines, of the command that took longest."""

    case: str
    seconds: float
    lines: int
    work: list[Work]
    samples: dict[int, Samples] = field(default_factory=dict)


def run_case(case: Case, model: Path, lines: Sequence[str], place: Path, flags: Sequence[str]) -> Outcome:
    """Run the batch in one way. Raises ConfigError where a command fails or a line has no answer."""
    place.mkdir(parents=True)
    parts = [lines] if case.instances else [lines[number :: case.separate] for number in range(case.separate)]
    commands = [_Command(case, number, part, model, place, flags) for number, part in enumerate(parts)]
    roots = [one.process.pid for one in commands]
    was_killed = False
    try:
        while not all(one.answered or one.has_ended for one in commands):
            time.sleep(_LOOK_S)
        with ExitStack() as stack:
            samples = stack.enter_context(watched(roots))
            if case.slowed:
                stack.enter_context(slowed(roots))
            while not all(one.has_ended for one in commands):
                due = case.killed_at is not None and commands[0].answered >= case.killed_at * len(lines)
                if due and not was_killed:
                    kill_last(roots)
                    was_killed = True
                time.sleep(_LOOK_S)
        work = [one.work() for one in commands]
    finally:
        for one in commands:
            one.end()
    seconds = max(one.wall_s for one in work)
    return Outcome(case=case.name, seconds=seconds, lines=len(lines), work=work, samples=samples)


def work_of(manifest: dict[str, Any], began: float) -> Work:
    """Return what a run of this manifest computed, whose command began at this Unix time."""
    counters = manifest["engine"]["counters"]
    return Work(
        start_s=datetime.fromisoformat(manifest["started_at"]).timestamp() - began,
        wall_s=manifest["wall_s"],
        prompt_tokens=counters["prompt_tokens"],
        prefill_s=counters["prefill_us"] / 1e6,
    )


class _Command:
    """One `sgl-batch run`, on a core of its own where it is an engine by itself."""

    def __init__(
        self, case: Case, number: int, lines: Sequence[str], model: Path, place: Path, flags: Sequence[str]
    ) -> None:
        source, self._output = place / f"in-{number}.jsonl", place / f"out-{number}.jsonl"
        source.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        self._log = place / f"log-{number}.txt"
        argv = [sys.executable, "-m", "sgl_batch.cli", "run", "-i", str(source), "-o", str(self._output)]
        argv += ["--model", str(model), "--progress", "plain", *flags]
        if case.instances:
            argv += ["--instances", str(case.instances), "--cpus-per-instance", "1"]
        else:
            argv = ["taskset", "-c", str(number), *argv]
        if case.ahead is not None:
            argv += ["--max-in-flight", str(case.ahead)]
        self._began = time.time()
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT)

    @property
    def has_ended(self) -> bool:
        """Whether the command has ended."""
        return self.process.poll() is not None

    @property
    def answered(self) -> int:
        """How many lines are in the output, or wait beside it for earlier ones."""
        files = [self._output, *self._output.parent.glob(f".{self._output.name}.kept-*")]
        return sum(one.read_bytes().count(b"\n") for one in files if one.exists())

    def work(self) -> Work:
        """Return what it computed. Raises ConfigError where it failed."""
        if self.process.returncode:
            raise ConfigError(f"sgl-batch run ended with {self.process.returncode}; its messages are in {self._log}")
        manifest = self._output.with_name(f"{self._output.stem}.manifest.json")
        return work_of(json.loads(manifest.read_text("utf-8")), self._began)

    def end(self) -> None:
        """End it, if it runs still."""
        if not self.has_ended:
            self.process.terminate()
            self.process.wait(60)
