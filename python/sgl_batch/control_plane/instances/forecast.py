"""Predicts a run of several instances from what their plans predict together. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sgl_batch.core.plan_rates import Load, PlanRates
from sgl_batch.planner.feeding import feeding_s
from sgl_batch.planner.schedule import Prediction
from sgl_batch.planner.workload import Workload

OWN_PLANS = "each instance takes its own plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What predicts batches on all instances. `rates`: those of all of them together."""

    rates: PlanRates
    instances: int

    def predict(self, workload: Workload) -> Prediction:
        """Return the predicted run, without its parts: an even share on each instance, and feeding them all."""
        prompts, outputs = workload.tokens
        longest = max(request.output for request in workload.requests)
        seconds = self.rates.seconds(Load(prompt_tokens=prompts, output_tokens=outputs, longest_output=longest))
        return Prediction(
            seconds=seconds + feeding_s(workload.count, self.instances),
            prefill_s=prompts / self.rates.prompt_tokens_per_s,
        )

    def planned(self, workload: Workload) -> Mapping[str, Any]:
        """Return what a manifest says about the plan."""
        seconds = self.predict(workload).seconds
        prompts, outputs = workload.tokens
        return {
            "source": f"{OWN_PLANS}; predicted {seconds:,.1f} s for {workload.count:,} requests on {self.instances} "
            f"instances ({workload.source})",
            "chosen": {},
            "workload": {
                "source": workload.source,
                "requests": workload.count,
                "prompt_tokens": prompts,
                "output_tokens": outputs,
            },
            "predicted": {"seconds": round(seconds, 3)},
        }


def forecast_of(ready: PlanRates | None, num_ready: int, instances: int) -> Forecast | None:
    """Return what predicts so many instances, of which some are ready; None where their plans predict nothing.

    Args:
        ready: The rates of the ready ones together.
        num_ready: How many these are. The others count as they do, on average.
        instances: All of them.
    """
    if ready is None or not num_ready:
        return None
    times = instances / num_ready
    rates = PlanRates(
        prompt_tokens_per_s=times * ready.prompt_tokens_per_s,
        output_tokens_per_s=times * ready.output_tokens_per_s,
        step_s=ready.step_s,
    )
    return Forecast(rates=rates, instances=instances)
