"""Owns what both sides of a batch do alike: follow their table of the protocol, drive a transfer, keep what failed.

What the actions of the table do is each side's own. Decides neither moves nor ownership.
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
    """One side's part of the protocol: its table, and what its states and messages are to it.

    `before_transfer`: tensors have yet to travel; `transferring`: they do. `results` says what each of
    `end_states` means, of which `moved` needs no explanation; a sequence for which there was no room ends as `no_room`.
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
    """One rank's side of the sequences that go from one rank to another at one boundary.

    `failures` is what went wrong since somebody last took note; `gave_up` whether waiting on is of no use by itself.
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
        """What the table's actions do on this side."""

    @abstractmethod
    def _take_in(self, message: Message) -> str | None:
        """Keep what a message that the table allows says, or what is wrong with it."""

    @abstractmethod
    def _begin_transfer(self) -> Transfer:
        """Send or receive the tensors, which is due now."""

    def _transferred(self) -> None:
        """The transfer has ended well."""

    @property
    def ended(self) -> bool:
        return self.state in self._rules.end_states

    @property
    def awaiting(self) -> str:
        """What comes next, for the error that says it did not come."""
        return f"{self.state.value} for {self.id}"

    @property
    def progress(self) -> tuple[str, int]:
        """Changes whenever anything has moved on."""
        return self.state.name, self._transfer.moved_bytes if self._transfer else 0

    @property
    def past_data(self) -> bool:
        """Whether this side will touch the transport for this batch no more."""
        if self._transfer is not None:
            return self._transfer.done
        return self.state not in self._rules.before_transfer | {self._rules.transferring}

    def handle(self, message: Message) -> None:
        """Take in a message of the other side."""
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
        """Take in what went wrong with the peer or the transport; the table says what follows."""
        self.failures.append(error)
        if self.ended:
            return
        self.gave_up = True
        self._apply(self._rules.peer_dead if isinstance(error, PeerLost) else self._rules.give_up)

    def work(self, may_transfer: bool) -> None:
        """Begin the transfer if it is due and allowed, and notice its end."""
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
        """What has become of each sequence, as far as this side knows."""
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
