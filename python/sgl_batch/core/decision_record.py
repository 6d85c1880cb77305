"""Owns records of decisions as plain data: what each decision was made from, and its actions. `replay` reads them.

Of the waiting sequences a record holds those that the decision read, in their order, and how many there were.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from sgl_batch.core.actions import Actions, Chunk, Join, PrefillChoices, Step
from sgl_batch.core.kv_state import KVState
from sgl_batch.core.page_boundary import State
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.partition_costs import PartitionCosts
from sgl_batch.core.plan import Plan
from sgl_batch.core.rank_agreement import GroupDecision
from sgl_batch.core.rank_moves import Migration
from sgl_batch.core.rank_state import Movable, RankState
from sgl_batch.core.sequence import SequenceState
from sgl_batch.core.sequence_queue import of_prompt

VERSION = 8
# The counts of a State by their names in a record.
COUNTS = {
    "running": "running",
    "steps": "steps",
    "slots": "request_slots",
    "free_slots": "free_request_slots",
    "filling": "filling",
    "changed": "changed",
    "returning": "returning",
    "forked": "forked",
    "queued_tokens": "queued_tokens",
    "urgent": "urgent",
}

Plain = dict[str, Any]
_OF_A_SEQUENCE = tuple(one.name for one in fields(SequenceState))


class _RecordingView(Sequence[SequenceState]):
    """A view that remembers which of its sequences were read."""

    def __init__(self, view: Sequence[SequenceState]) -> None:
        self._view = view
        self._read: dict[str, SequenceState] = {}

    def __len__(self) -> int:
        return len(self._view)

    def __iter__(self) -> Iterator[SequenceState]:
        for sequence in self._view:
            self._read[sequence.sequence_id] = sequence
            yield sequence

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("decisions read a view in its order")

    def of_prompt(self, group: str) -> list[SequenceState]:
        found = of_prompt(self._view, group)
        self._read.update({sequence.sequence_id: sequence for sequence in found})
        return found

    def rows(self) -> Plain:
        """Return the sequences that were read, as plain data, and how many the view has."""
        return {"rows": rows_of(self._read.values()), "count": len(self._view)}


class Observed:
    """Wraps the views of one decision. After a decision was made from `state` and `kv`, `record` returns its record."""

    def __init__(self, state: State, kv: KVState) -> None:
        self._queued, self._ready, self._choices = (
            _RecordingView(state.queued),
            _RecordingView(state.ready),
            _RecordingView(kv.choices),
        )
        self._runners: list[SequenceState] = []
        self._own_kv = kv
        self.state = replace(state, queued=self._queued, ready=self._ready)
        self.kv = replace(kv, choices=self._choices, runners=self._read_runners)

    def _read_runners(self) -> list[SequenceState]:
        self._runners = list(self._own_kv.runners())
        return self._runners

    def record(
        self, plan: Plan, policy: str, actions: Actions, *, decision: str = "next", others_run: bool = False
    ) -> Plain:
        """Return the decision as plain data.

        `decision`: what was decided. "next": what the rank does next. With several ranks, "growth": which reservations
        are extended at a boundary; "boundary": what a rank does at a boundary at which no rank prefills; "step": its
        part in a step.
        """
        counts_alone = decision in ("next", "step") and not plan.mix_prefill and _from_counts_alone(actions)
        return {
            "version": VERSION,
            "decision": decision,
            "policy": policy,
            "others_run": others_run,
            "plan": plan.as_dict(),
            "state": {**numbers_of(self.state), "queued": self._queued.rows(), "ready": self._ready.rows()},
            "kv": {"arrived": self.kv.arrived} if counts_alone else self._plain_kv(),
            "actions": plain_actions(actions),
        }

    def _plain_kv(self) -> Plain:
        kv = self._own_kv
        numbers: dict[Any, int] = {}

        def numbered(pages: Iterable[Any]) -> list[int]:
            return [numbers.setdefault(page, len(numbers)) for page in pages]

        seen = [*self._runners, *self._ready._read.values(), *self._choices._read.values()]
        admission = kv.admission
        return {
            "device": {
                "total_pages": kv.device.total_pages,
                "prompt_pages": kv.device.prompt_pages,
                "reserved": kv.device.reservations(),
            },
            "admission": {
                "total_pages": admission.total_pages,
                "overflow_pages": admission.overflow_pages,
                "largest": admission.largest,
                "free_pages": admission.free_pages,
                "pool_pages": admission.pool_pages,
                "admits": admission.admits,
                "two_tiers": admission.two_tiers,
                "is_device": admission is kv.device,
                **_plain_growth(admission),
            },
            "runners": rows_of(self._runners),
            "choices": self._choices.rows(),
            "resident_prompts": {name: numbered(pages) for name, pages in kv.prompts.holdings().items()},
            "prompt_pages_of": {s.sequence_id: numbered(kv.pages_of(s.sequence_id)) for s in seen},
            "store_free": kv.store_free,
            "arrived": kv.arrived,
            "streams": kv.streams,
            "interval": asdict(kv.interval),
        }


def _plain_growth(ledger: PageLedger) -> Plain:
    """What an account has beyond its sums where reservations grow; nothing else has it."""
    if not ledger.policy.grows:
        return {}
    return {
        "prompt_pages": ledger.prompt_pages,
        "reserved": ledger.reservations(),
        "needs": ledger.needs(),
        "stalled": dict(ledger.stalled),
        "borrower": ledger.borrower,
        "away": sorted(ledger.away),
    }


def _from_counts_alone(actions: Actions) -> bool:
    """Return whether a decision read only the counts of a state, since it was made between boundaries."""
    return actions in ((Step(),), (Join(),)) or isinstance(actions[0], PrefillChoices)


def rows_of(sequences: Iterable[SequenceState]) -> list[Plain]:
    """Return sequences as plain data."""
    # A sequence has no parts that `asdict` would have to copy.
    return [
        {name: getattr(one, name) for name in _OF_A_SEQUENCE} | {"status": one.status.value, "ranks": sorted(one.ranks)}
        for one in sequences
    ]


def numbers_of(state: State) -> Plain:
    """Return the counts of a state as plain data, and the sequence whose prompt is computed in part."""
    begun = None if state.begun is None else rows_of([state.begun])[0]
    return {**{name: getattr(state, attribute) for name, attribute in COUNTS.items()}, "begun": begun}


def plain_actions(actions: Iterable[Any]) -> list[Plain]:
    """Return actions as plain data, with sequences by their ids."""
    return [
        {"action": type(action).__name__, **{one.name: _plain(getattr(action, one.name)) for one in fields(action)}}
        for action in actions
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, SequenceState):
        return value.sequence_id
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if hasattr(value, "members"):  # a unit of admission
        return [member.sequence_id for member in value.members]
    if isinstance(value, Chunk):
        return {"sequence": value.sequence.sequence_id, "start": value.start, "tokens": value.tokens}
    if isinstance(value, frozenset):
        return sorted(value)
    return value


def arrival_record(
    sequence: SequenceState,
    device: PageLedger,
    store: PageLedger | None,
    most_prompt_tokens: int | None,
    actions: Actions,
) -> Plain:
    """Return the decision about a sequence that has arrived, as plain data."""
    return {
        "version": VERSION,
        "decision": "arrival",
        "sequence": rows_of([sequence])[0],
        "page_size": device.page_size,
        "device_pages": device.total_pages,
        "store_pages": None if store is None else store.most_pages,
        "most_prompt_tokens": most_prompt_tokens,
        "actions": plain_actions(actions),
    }


def plan_record(before: Plan, after: Plan, flags: Mapping[str, Any], device: Mapping[str, Any], why: str) -> Plain:
    """Return a change of the plan, as plain data.

    `flags`: the configuration from then on, by the names of its flags. `device`: what the plan is fitted to.
    """
    return {
        "version": VERSION,
        "decision": "plan",
        "why": why,
        "before": before.as_dict(),
        "flags": dict(flags),
        "device": dict(device),
        "actions": after.as_dict(),
    }


def group_record(
    states: Sequence[RankState],
    plan: Plan,
    migration: Migration,
    decision: GroupDecision,
    callbacks: Mapping[str, str] | None = None,
    costs: PartitionCosts | None = None,
) -> Plain:
    """Return a decision for several ranks, as plain data, with the states that the ranks sent.

    `callbacks`: the names of a user's callbacks that were in force, by what they decide. `costs`: measured seconds of
    passes that ranks share, where they were known.
    """
    return {
        "version": VERSION,
        "decision": "group",
        "plan": plan.as_dict(),
        "migration": migration.value,
        "callbacks": dict(callbacks or {}),
        "costs": None if costs is None else costs.as_dict(),
        "ranks": [_plain_rank(rank) for rank in states],
        "actions": plain_group(decision),
    }


def plain_group(decision: GroupDecision) -> Plain:
    """Return what was decided for several ranks, as plain data."""
    return {
        "actions": [plain_actions(actions) for actions in decision.actions],
        "busy": decision.busy,
        "prefill": decision.prefill,
        "expert_calls": decision.expert_calls,
        "fault": None if decision.fault is None else decision.fault.text,
        "leases": [asdict(lease) for lease in decision.leases],
        "copies": [asdict(copy) for copy in decision.copies],
    }


def _plain_rank(rank: RankState) -> Plain:
    state = rank.state
    return {
        "state": {
            **numbers_of(state),
            "queued": {"rows": rows_of(state.queued), "count": len(state.queued)},
            "ready": {"rows": rows_of(state.ready), "count": len(state.ready)},
        },
        "total_pages": rank.total_pages,
        "free_pages": rank.free_pages,
        "overflow_pages": rank.overflow_pages,
        "largest": rank.largest,
        "grows": rank.grows,
        "largest_gap": rank.largest_gap,
        "has_waiting": rank.has_waiting,
        "capacity": None if rank.capacity is None else asdict(rank.capacity),
        "ready": _plain_movable(rank.ready),
        "running": _plain_movable(rank.running),
        "partition": sorted(rank.partition),
        "replicas": rank.replicas,
        "takes_replicas": rank.takes_replicas,
        "ended": list(rank.ended),
        "store": None if rank.store is None else asdict(rank.store),
        "lacking": rank.lacking,
        "device_room": rank.device_room,
        "replica_room": rank.replica_room,
        "sends_pages": rank.sends_pages,
        "held": [asdict(copy) for copy in rank.held],
        "queued": _plain_movable(rank.queued),
        "rates": asdict(rank.rates),
    }


def _plain_movable(items: Iterable[Movable]) -> list[Mapping[str, Any]]:
    numbers = ("tokens", "pages", "gap", "leased", "replicable")
    return [
        {"sequence": rows_of([item.sequence])[0], **{name: getattr(item, name) for name in numbers}} for item in items
    ]
