"""Owns the agreement of the ranks of a group on each step and at each boundary. core/ decides.

Before every step each rank publishes a header: what it has to do. With an all-gather, each rank decides the step by
itself, from the same headers. Without one, the ranks send their headers to the control rank, which decides and sends
the step to all. At a boundary the control rank always decides, from the states of all ranks. No rank enters a
collective before it knows the step, so that all ranks enter the same collectives.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol, TypeVar

from sgl_batch.core.decision_record import group_record
from sgl_batch.core.group_callbacks import BUILT_IN, Callbacks
from sgl_batch.core.group_decider import GroupDecider
from sgl_batch.core.partition_costs import PartitionCosts
from sgl_batch.core.plan import Plan
from sgl_batch.core.rank_agreement import GroupStep, RankHeader, next_step
from sgl_batch.core.rank_moves import Migration
from sgl_batch.core.topology import Topology
from sgl_batch.distributed.channel import Channel
from sgl_batch.errors import EngineError
from sgl_batch.managers.rank_messages import (
    BoundaryActions,
    DoneMessage,
    HeaderMessage,
    Message,
    StateMessage,
    StepMessage,
    actions_for,
    state_of,
    step_of,
    to_message,
)
from sgl_batch.managers.trace import TraceWriter

logger = logging.getLogger(__name__)

M = TypeVar("M", HeaderMessage, StepMessage, StateMessage, BoundaryActions, DoneMessage)


class AllGather(Protocol):
    """An exchange of a few numbers among all ranks."""

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Return the values of all ranks, by rank. Every rank calls this, with equally many values."""

    def take_waited_s(self) -> float:
        """Return the seconds waited for other ranks since the last call of this."""


class RankGroup:
    """One rank's end of the agreement. `timeout_s` bounds every wait for another rank's message.

    `migration` and `callbacks` are those of the control rank; the others do not read theirs.
    """

    def __init__(
        self,
        channel: Channel[Message],
        topology: Topology,
        *,
        migration: Migration,
        callbacks: Callbacks = BUILT_IN,
        timeout_s: float,
        all_gather: AllGather | None = None,
        trace: TraceWriter | None = None,
    ) -> None:
        self._all_gather = all_gather
        self._trace = trace if trace is not None and trace.is_open else None
        self._channel, self.rank, self._num_ranks = channel, channel.rank, topology.num_ranks
        self._decider, self._timeout_s = GroupDecider(migration, callbacks), timeout_s
        self._control_rank = topology.control_rank
        self._others = [rank for rank in range(self._num_ranks) if rank != self._control_rank]

    def agree(self, header: RankHeader, plan: Plan) -> GroupStep:
        """Return the step that all ranks take. `header`: this rank's; `plan`: the same on all ranks."""
        if self._all_gather is not None:
            return next_step([_header_in(row) for row in self._all_gather.gather(_row_of(header))], plan)
        own = HeaderMessage(header.running, header.waiting, header.forked, header.due, header.plan_changes)
        if self.rank != self._control_rank:
            self._channel.send(self._control_rank, own)
            answer = self._receive([self._control_rank], StepMessage, "the next step")[1]
            return step_of(answer)
        headers = self._gather(own, HeaderMessage, "what it has to do next")
        step = next_step([_header_of(header) for header in headers], plan)
        for peer in self._others:
            self._channel.send(peer, to_message(step))
        return step

    def decide_by(self, costs: PartitionCosts | None) -> None:
        """Let boundaries be decided by these measured seconds, on the control rank; None where nothing is known."""
        self._decider.costs = costs

    def take_waited_s(self) -> float:
        """Return the seconds waited in the all-gather since the last call of this; 0 without an all-gather."""
        return 0.0 if self._all_gather is None else self._all_gather.take_waited_s()

    def decide(self, state: StateMessage, plan: Plan) -> BoundaryActions:
        """Return this rank's actions at a boundary, decided from the states of all ranks. `state`: this rank's."""
        if self.rank != self._control_rank:
            self._channel.send(self._control_rank, state)
            return self._receive([self._control_rank], BoundaryActions, "its actions at a boundary")[1]
        states = self._gather(state, StateMessage, "its state at a boundary")
        ranks = [state_of(message, rank) for rank, message in enumerate(states)]
        names = self._decider.callbacks.names
        decision = self._decider.decide(ranks, plan)
        if decision.fault is not None:
            logger.error("%s", decision.fault.text)
        if self._trace is not None:
            self._trace.write_decision(
                group_record(ranks, plan, self._decider.migration, decision, names, self._decider.costs)
            )
        for peer in self._others:
            self._channel.send(peer, actions_for(decision, peer))
        return actions_for(decision, self.rank)

    def all_done(self, done: bool) -> bool:
        """Return whether all ranks have done their parts. Every rank calls this, with whether it has. The same on all.

        Waits for the others, which raises PeerLost or PeerTimeout as everywhere.
        """
        if self._all_gather is not None:
            return all(row[0] for row in self._all_gather.gather([int(done)]))
        if self.rank != self._control_rank:
            self._channel.send(self._control_rank, DoneMessage(done))
            return self._receive([self._control_rank], DoneMessage, "whether all ranks are done")[1].done
        answers = self._gather(DoneMessage(done), DoneMessage, "whether it is done")
        verdict = all(answer.done for answer in answers)
        for peer in self._others:
            self._channel.send(peer, DoneMessage(verdict))
        return verdict

    def _gather(self, own: M, kind: type[M], awaiting: str) -> list[M]:
        """Receive one message of each other rank; return all messages by rank."""
        found = {self.rank: own}
        while len(found) < self._num_ranks:
            missing = [rank for rank in range(self._num_ranks) if rank not in found]
            peer, message = self._receive(missing, kind, awaiting)
            found[peer] = message
        return [found[rank] for rank in range(self._num_ranks)]

    def _receive(self, peers: list[int], kind: type[M], awaiting: str) -> tuple[int, M]:
        while True:
            received = self._channel.recv(peers, timeout_s=self._timeout_s, awaiting=awaiting)
            if received is None:
                continue
            peer, message = received
            if not isinstance(message, kind):
                raise EngineError(
                    f"rank {peer} sent {type(message).__name__} where rank {self.rank} awaited {awaiting}: "
                    "the ranks run different steps"
                )
            return peer, message


def _row_of(header: RankHeader) -> list[int]:
    return [header.running, header.waiting, header.forked, int(header.due), header.plan_changes]


def _header_in(row: list[int]) -> RankHeader:
    running, waiting, forked, due, plan_changes = row
    return RankHeader(running=running, waiting=waiting, forked=forked, due=bool(due), plan_changes=plan_changes)


def _header_of(message: HeaderMessage) -> RankHeader:
    return RankHeader(
        running=message.running,
        waiting=message.waiting,
        forked=message.forked,
        due=message.due,
        plan_changes=message.plan_changes,
    )
