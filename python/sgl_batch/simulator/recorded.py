"""Makes a simulation of what a trace file recorded: the same sequences, plan and memory, on the same ranks.

A trace has each decision with the state from which it was made (core/decision_record). Of the run's times it has those
of changes of state, from which the number of running sequences over time follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sgl_batch.core.admission_policy import AdmissionPolicy
from sgl_batch.core.plan import Plan
from sgl_batch.core.rank_moves import Migration
from sgl_batch.core.replay import plan_of
from sgl_batch.core.sequence import Status
from sgl_batch.errors import ConfigError
from sgl_batch.planner.candidate import DEVICE
from sgl_batch.simulator.instance import Instance
from sgl_batch.simulator.kv_forms import FILE_PAGES, RankPages, make_form
from sgl_batch.simulator.machine_costs import MachineCosts
from sgl_batch.simulator.rank import SimulatedRank
from sgl_batch.simulator.requests import Requests
from sgl_batch.simulator.scheduler import Ours

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A run as its trace tells it.

    Attributes:
        plan: In force.
        form: The name of the KV policy of all ranks.
        memory: Pages of each rank.
        request_slots: Sequences that a rank can hold.
        migration: Which sequences may change their rank.
        requests: The sequences by the number of their arrival.
        of_rank: By rank, the numbers of those that arrived there.
    """

    plan: Plan
    form: str
    memory: RankPages
    request_slots: int
    migration: Migration
    requests: Requests
    of_rank: tuple[tuple[int, ...], ...]


def read_run(events: Sequence[Event], outputs: Mapping[str, int] | None = None) -> RecordedRun:
    """Return the run that a trace of one engine recorded.

    `outputs`: tokens that each sequence generated, by id; by default each generated all that it might.

    Raises ConfigError if the trace has no decision about queued sequences, or choices that share a prompt.
    """
    decisions = [event for event in events if "plan" in event]
    own = [event for event in decisions if "device" in event.get("kv", ())]
    groups = [event for event in decisions if event["decision"] == "group"]
    first = _arrivals(decisions)
    if not first or not (own or groups):
        raise ConfigError("the trace has no decision about queued requests; record a run with --trace-file")
    rows = sorted(first.values(), key=lambda placed: int(placed[1]["arrival"]))
    if any(row["prompt_group"] is not None for _, row in rows):
        raise ConfigError("the trace has requests with several choices, which are not simulated")
    lengths = [(outputs or {}).get(row["sequence_id"], row["max_new_tokens"]) for _, row in rows]
    state = (own[0] if own else groups[0]["ranks"][0])["state"]
    ranks = len(groups[0]["ranks"]) if groups else 1
    return RecordedRun(
        plan=plan_of(decisions[0]["plan"]),
        form=str(own[0]["policy"]) if own else DEVICE,
        memory=_memory(own[0]["kv"]) if own else RankPages(device=int(groups[0]["ranks"][0]["total_pages"])),
        request_slots=int(state["slots"]),
        migration=Migration(groups[0]["migration"]) if groups else Migration.NEVER,
        requests=Requests(
            prompts=np.array([row["prompt_tokens"] for _, row in rows], dtype=np.int64),
            outputs=np.array(lengths, dtype=np.int64),
            most=np.array([row["max_new_tokens"] for _, row in rows], dtype=np.int64),
        ),
        of_rank=tuple(tuple(number for number, (on, _) in enumerate(rows) if on == rank) for rank in range(ranks)),
    )


def _arrivals(decisions: Iterable[Event]) -> dict[str, tuple[int, Event]]:
    """Return the rank and the state of each sequence when it was first seen in a queue, by its id."""
    first: dict[str, tuple[int, Event]] = {}
    for event in decisions:
        states = enumerate(event["ranks"]) if event["decision"] == "group" else [(int(event["rank"]), event)]
        for rank, of_rank in states:
            for row in of_rank["state"]["queued"]["rows"]:
                first.setdefault(row["sequence_id"], (rank, row))
    return first


def _memory(kv: Event) -> RankPages:
    """Return the pages of a rank. Without a store, its overflow file grows as it must."""
    admission = kv["admission"]
    without = FILE_PAGES if admission["is_device"] else int(admission["total_pages"])
    return RankPages(device=int(kv["device"]["total_pages"]), store=int(admission["overflow_pages"]) or without)


def simulated(run: RecordedRun, costs: MachineCosts, admission: Mapping[int, AdmissionPolicy]) -> Instance:
    """Return an instance that will run the same sequences. `admission`: the policy of each rank, a new one."""
    ranks = []
    for rank, numbers in enumerate(run.of_rank):
        form = make_form(run.form, run.memory, run.plan.page_size, admission[rank])
        ranks.append(SimulatedRank(run.requests, numbers, run.plan, form, request_slots=run.request_slots))
    return Instance(
        ranks,
        run.plan,
        Ours(ranks[0].form.policy),
        costs,
        first_use=costs.of_first_use,
        migration=run.migration,
    )


def running_over_time(events: Iterable[Event]) -> tuple[list[float], list[int]]:
    """Return times from the first change of state, in seconds, and how many sequences run from each of them on.

    Raises ConfigError if the trace has no changes of state.
    """
    changes = sorted((event for event in events if "from" in event), key=lambda event: float(event["t"]))
    if not changes:
        raise ConfigError("the trace has no changes of state; record a run with --trace-file")
    start, running = float(changes[0]["t"]), set[str]()
    times, counts = [0.0], [0]
    for event in changes:
        if event["to"] == Status.RUNNING.value:
            running.add(event["sequence"])
        else:
            running.discard(event["sequence"])
        times.append(float(event["t"]) - start)
        counts.append(len(running))
    return times, counts
