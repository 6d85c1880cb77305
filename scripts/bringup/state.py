"""Owns the file of a bring-up's progress: the outcome of each stage, written after each one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

OK, FAILED, NOT_RUN = "ok", "failed", "not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A stage's outcome. `tokens`: their comparison; `remark`: the last error line, or other information."""

    state: str = NOT_RUN
    seconds: float = 0.0
    tokens: str = ""
    remark: str = ""


class StateFile:
    """Outcomes by stage. A stage that was under way when a run was killed has none, and runs again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.outcomes: dict[str, Outcome] = {}
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            self.outcomes = {name: Outcome(**fields) for name, fields in kept.items()}

    def set(self, stage: str, outcome: Outcome) -> None:
        """Store an outcome; it is on disk when this returns."""
        self.outcomes[stage] = outcome
        partial = self._path.with_suffix(".partial")
        kept = {name: asdict(one) for name, one in self.outcomes.items()}
        partial.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        partial.replace(self._path)

    def get(self, stage: str) -> Outcome:
        """Return the outcome of a stage; a stage that never ran has one that says so."""
        return self.outcomes.get(stage, Outcome())
