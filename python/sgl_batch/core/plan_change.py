"""Owns a change of the plan as it reaches the ranks of a running engine: what changes, why, and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sgl_batch.config import field_names

_WHY = "why_at_boundary"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """New values of the configuration, by the names of `BatchConfig`.

    why: the reason of a refinement, for the trace; it comes into force at the next boundary. Without a reason a person
        or a program has asked for the change, and it comes into force with the next step.
    """

    values: Mapping[str, Any]
    why: str = ""

    def as_message(self) -> dict[str, Any]:
        """Return the change as a request to change the state of all ranks carries it."""
        return {**self.values, **({_WHY: self.why} if self.why else {})}

    @classmethod
    def of_message(cls, message: Mapping[str, Any]) -> PlanChange | None:
        """Return the change that a request carries; None for a request that has names of SGLang's."""
        values = {name: value for name, value in message.items() if name != _WHY}
        return cls(values=values, why=str(message.get(_WHY, ""))) if values.keys() <= field_names() else None
