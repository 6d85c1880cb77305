"""Owns what both sides of a batch have in common: they follow their table, drive a transfer and keep failures.

Each side implements the actions of its table. `protocol` decides about ownership.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from sgl_batch.distributed.rank_errors import BadMessage, PeerLost, RankError
from sgl_batch.distributed.transport import Transfer
from sgl_batch.migration.endpoints import Endpoints
from sgl_batch.migration.messages import Abort, Message, MigrationBatchId
from sgl_batch.migration.outcome import Outcome, Result
from sgl_batch.migration.protocol import (
    ReceiverAction,
    ReceiverEvent,
    ReceiverState,
    SenderAction,
    SenderEvent,
    SenderState,
    Step,
)

S = TypeVar("S", bound=SenderState | ReceiverState)
E = TypeVar("E", bound=SenderEvent | ReceiverEvent)
A = TypeVar("A", bound=SenderAction | ReceiverAction)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules(Generic[S, E, A]):
    """One side's part of the protocol: its table, and the meaning of its states and messages.

    `before_transfer`: the states before the tensors are moved; `transferring`: the state in which they are. `results`
    gives the result of each of `end_states`. The end state `moved` needs no reason. A sequence for which there was no
    room ends as `no_room`.
    """

    transitions: Mapping[tuple[S, E], Step[S, A]]
    events: Mapping[type[Message], E]
    give_up: E
    peer_dead: E
    before_transfer: frozenset[S]
    transferring: S
    end_states: frozenset[S]
    results: Mapping[S, Result]
    moved: S
    no_room: Result


class ProtocolEndpoint(ABC, Generic[S, E, A]):
    """One rank's side of a batch.

    `failures`: what has failed since the last report. `gave_up`: this side waits no longer by itself; only a message or
    the peer's death resolves the batch.
    """

    def __init__(
        self,
        batch: MigrationBatchId,
        peer: int,
        sequence_ids: Sequence[str],
        endpoints: Endpoints,
        rules: Rules[S, E, A],
        state: S,
    ) -> None:
        self.id, self.peer, self.state = batch, peer, state
        self.failures: list[RankError] = []
        self.gave_up = False
        self._endpoints, self._rules = endpoints, rules
        self._sequence_ids = tuple(sequence_ids)
        self._refused: dict[str, str] = {}
        self._transfer: Transfer | None = None
        self._data_due = False
        self._do: Mapping[A, Callable[[], None]] = self._actions()

    @abstractmethod
    def _actions(self) -> Mapping[A, Callable[[], None]]:
        """Return the function of each of the table's actions."""

    @abstractmethod
    def _take_in(self, message: Message) -> str | None:
        """Keep the content of a message that the table allows; return what is wrong with it, or None."""

    @abstractmethod
    def _begin_transfer(self) -> Transfer:
        """Begin to send or receive the tensors."""

    def _transferred(self) -> None:
        """Take note that the transfer has ended with success."""

    @property
    def ended(self) -> bool:
        return self.state in self._rules.end_states

    @property
    def awaiting(self) -> str:
        """What this side waits for, as errors name it."""
        return f"{self.state.value} for {self.id}"

    @property
    def progress(self) -> tuple[str, int]:
        """A value that differs after any progress."""
        return self.state.name, self._transfer.moved_bytes if self._transfer else 0

    @property
    def past_data(self) -> bool:
        """Whether this side no longer uses the transport for this batch."""
        if self._transfer is not None:
            return self._transfer.done
        return self.state not in self._rules.before_transfer | {self._rules.transferring}

    def handle(self, message: Message) -> None:
        """Process a message of the other side."""
        event = self._rules.events.get(type(message))
        if event is None or (self.state, event) not in self._rules.transitions:
            fault = f"rank {self.peer} sent {type(message).__name__} instead of {self.awaiting}"
            self.fail(BadMessage(self.peer, fault))
            return
        if (refused := self._take_in(message)) is not None:
            self.fail(BadMessage(self.peer, refused))
            return
        if isinstance(message, Abort) and not self.ended:
            self.failures.append(RankError(self.peer, f"rank {self.peer} gave up {self.id}: {message.reason}"))
        self._apply(event)

    def fail(self, error: RankError) -> None:
        """Process a failure of the peer or the transport, as the table says."""
        self.failures.append(error)
        if self.ended:
            return
        self.gave_up = True
        self._apply(self._rules.peer_dead if isinstance(error, PeerLost) else self._rules.give_up)

    def work(self, may_transfer: bool) -> None:
        """Begin the transfer if it is due and `may_transfer`, and process its end."""
        try:
            if self._data_due and may_transfer:
                self._data_due = False
                self._transfer = self._begin_transfer()
            if self._transfer is None or not self._transfer.done or self.state is not self._rules.transferring:
                return
            self._transfer.wait(0)
        except RankError as error:
            self.fail(error)
            return
        self._transferred()

    def outcomes(self) -> list[Outcome]:
        """Return the outcome of each sequence, as far as this side knows."""
        rules = self._rules
        result = rules.results.get(self.state, Result.IN_DOUBT)
        why = "" if self.state is rules.moved or not self.failures else str(self.failures[-1])
        return [
            Outcome(sequence_id=name, peer=self.peer, result=rules.no_room, reason=self._refused[name])
            if name in self._refused
            else Outcome(sequence_id=name, peer=self.peer, result=result, reason=why)
            for name in self._sequence_ids
        ]

    def _apply(self, event: E) -> None:
        step = self._rules.transitions[self.state, event]
        self.state = step.state
        for action in step.actions:
            try:
                self._do[action]()
            except RankError as error:
                self.fail(error)
                return

    def _send(self, message: Message) -> None:
        self._endpoints.channel.send(self.peer, message)

    def _send_abort(self) -> None:
        self._send(Abort(batch=self.id, reason=str(self.failures[-1])))

    def _ask_for_data(self) -> None:
        self._data_due = True

    def _stop_data(self) -> None:
        self._data_due = False
        if self._transfer is not None:
            self._transfer.abandon()
