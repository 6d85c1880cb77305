"""Owns the file that says how far a bring-up is: the outcome of each stage, kept after each one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

OK, FAILED, NOT_RUN = "ok", "failed", "not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a stage. `tokens`: how they compare; `remark`: the last error line, or what there is to know."""

    state: str = NOT_RUN
    seconds: float = 0.0
    tokens: str = ""
    remark: str = ""


class StateFile:
    """Outcomes by stage. What was under way when a run was killed has none, and so is run again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.outcomes: dict[str, Outcome] = {}
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            self.outcomes = {name: Outcome(**fields) for name, fields in kept.items()}

    def set(self, stage: str, outcome: Outcome) -> None:
        """Keep an outcome, on disk before this returns."""
        self.outcomes[stage] = outcome
        partial = self._path.with_suffix(".partial")
        kept = {name: asdict(one) for name, one in self.outcomes.items()}
        partial.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        partial.replace(self._path)

    def get(self, stage: str) -> Outcome:
        """The outcome of a stage: of one that never ran, that it has not."""
        return self.outcomes.get(stage, Outcome())
