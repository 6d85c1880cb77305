"""Puts the cost of a job at the user's own price into its object. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgl_batch.cli.jobs.cards import extra
from sgl_batch.jobs.cost import job_cost


def at_price(job: Mapping[str, Any], price_per_hour: float | None) -> Mapping[str, Any]:
    """Return a job with its cost at a price, in place of one at the server's price; without a price the job as it is.

    The cost is None where the server does not say what time of its engine the job had.
    """
    if price_per_hour is None:
        return job
    more = extra(job)
    spent = more.get("engine_time")
    cost = None if spent is None else job_cost(spent, more.get("expected_engine_time"), price_per_hour)
    return {**job, "x_sgl_batch": {**more, "cost": cost}}
