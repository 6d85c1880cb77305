"""Owns what a run costs: as its plan predicts it, in its progress, and at its end. The price is of jobs/cost.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sgl_batch.jobs.cost import Cost, EngineTime, cost_of, money, per_million_text
from sgl_batch.jobs.progress import Snapshot
from sgl_batch.jobs.progress_display import ProgressDisplay


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """The cost of a run at a price for an hour. The engine's start is not counted.

    `before`: what the plan predicts; None without a prediction. `after`: of the time that the run took; None before.
    """

    price_per_hour: float
    before: Cost | None = None
    after: Cost | None = None

    @classmethod
    def begin(
        cls, price_per_hour: float, planned: Mapping[str, Any], num_lines: int, num_predicted: int | None = None
    ) -> RunCost:
        """Return the cost before a run. A prediction for another number of lines counts in proportion.

        Args:
            price_per_hour: The price of the machine.
            planned: What the manifest says about the plan (`StartPlan.as_dict`).
            num_lines: The lines that the run answers.
            num_predicted: The lines of the predicted batch; None where each of its requests counts as a line. (A line
                with several choices is several requests.)
        """
        predicted, workload = planned.get("predicted"), planned.get("workload")
        if not predicted or not workload:
            return cls(price_per_hour=price_per_hour)
        time = EngineTime(
            seconds=predicted["seconds"],
            lines=num_predicted or workload["requests"],
            input_tokens=workload["prompt_tokens"],
            output_tokens=workload["output_tokens"],
        )
        return cls(price_per_hour=price_per_hour, before=cost_of(time.times(num_lines / time.lines), price_per_hour))

    def at_end(self, time: EngineTime) -> RunCost:
        """Return the cost with that of the time that the run took."""
        return replace(self, after=cost_of(time, self.price_per_hour))

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON for a manifest."""
        return {
            "price_per_hour": self.price_per_hour,
            **({} if self.after is None else self.after.as_dict()),
            "before": None if self.before is None else self.before.as_dict(),
        }

    def line(self) -> str:
        """Return it as a line for a terminal; empty before the run without a prediction."""
        shown = self.after or self.before
        if shown is None:
            return ""
        words = [money(shown.amount)]
        if self.before is not None:
            words.append("(by the plan)" if self.after is None else f"(by the plan {money(self.before.amount)})")
        per_million = per_million_text(shown.as_dict())
        return " ".join(words) + (f"; {per_million}" if per_million else "")


class PricedDisplay:
    """Adds to a run's progress the cost so far, and that of the whole run as soon as its time left is known."""

    def __init__(self, display: ProgressDisplay, price_per_hour: float) -> None:
        self._display, self._price_per_hour = display, price_per_hour

    def update(self, snapshot: Snapshot) -> None:
        """Show this moment with its cost."""
        self._display.update(self._priced(snapshot))

    def note(self, message: str) -> None:
        """Write the message."""
        self._display.note(message)

    def close(self, snapshot: Snapshot) -> None:
        """Show the last moment with its cost."""
        self._display.close(self._priced(snapshot))

    def _priced(self, snapshot: Snapshot) -> Snapshot:
        cost = f"cost {self._amount(snapshot.elapsed_s)}"
        if snapshot.eta_s and snapshot.done < snapshot.total:
            cost += f" of about {self._amount(snapshot.elapsed_s + snapshot.eta_s)}"
        return replace(snapshot, cost=cost)

    def _amount(self, seconds: float) -> str:
        return money(cost_of(EngineTime(seconds=seconds), self._price_per_hour).amount)
