"""Owns the receiver's side of one lot: does what the protocol's table says. Decides neither moves nor ownership."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_batch.distributed.rank_errors import BadMessage, PeerLost, RankError
from sgl_batch.distributed.transport import Transfer
from sgl_batch.migration.ends import Ends
from sgl_batch.migration.header import SequenceHeader
from sgl_batch.migration.messages import Abort, Accept, Commit, Committed, LotId, Message, Offer, Refuse, Stored
from sgl_batch.migration.outcome import Outcome, Result
from sgl_batch.migration.protocol import (
    RECEIVER_ENDS,
    RECEIVER_TRANSITIONS,
    ReceiverAction,
    ReceiverEvent,
    ReceiverState,
)
from sgl_batch.migration.store import Refusal, Reservation, layout_fault

_EVENTS: dict[type[Message], ReceiverEvent] = {
    Offer: ReceiverEvent.OFFER,
    Commit: ReceiverEvent.COMMIT,
    Abort: ReceiverEvent.ABORT,
}
_RESULTS = {ReceiverState.OWNED: Result.ADOPTED, ReceiverState.DROPPED: Result.NOT_ADOPTED}
_BEFORE_DATA = (ReceiverState.AWAITING, ReceiverState.JUDGING, ReceiverState.RECEIVING)


class ReceiverLot:
    """The sequences that come to this rank from one other at one boundary."""

    def __init__(self, lot: LotId, sequence_ids: Sequence[str], ends: Ends) -> None:
        self.id, self.peer = lot, lot.source
        self.state = ReceiverState.AWAITING
        self.failures: list[RankError] = []
        self.gave_up = False
        self._ends = ends
        self._sequence_ids = tuple(sequence_ids)
        self._offered: list[SequenceHeader] = []
        self._reserved: list[tuple[SequenceHeader, Reservation]] = []
        self._refused: dict[str, str] = {}
        self._transfer: Transfer | None = None
        self._data_due = False
        self._do = {
            ReceiverAction.JUDGE: self._judge,
            ReceiverAction.SEND_ACCEPT: lambda: self._send(Accept(lot=lot, refused=self._refused)),
            ReceiverAction.SEND_REFUSE: lambda: self._send(Refuse(lot=lot, refused=self._refused)),
            ReceiverAction.RECEIVE_DATA: self._ask_for_data,
            ReceiverAction.SEND_STORED: lambda: self._send(Stored(lot=lot)),
            ReceiverAction.ADOPT: self._adopt,
            ReceiverAction.SEND_COMMITTED: lambda: self._send(Committed(lot=lot)),
            ReceiverAction.SEND_ABORT: lambda: self._send(Abort(lot=lot, reason=str(self.failures[-1]))),
            ReceiverAction.FREE: self._free,
        }

    @property
    def ended(self) -> bool:
        return self.state in RECEIVER_ENDS

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
        """Whether this side will touch the transport for this lot no more."""
        if self._transfer is not None:
            return self._transfer.done
        return self.state not in _BEFORE_DATA

    def handle(self, message: Message) -> None:
        """Take in a message of the sender."""
        event = _EVENTS.get(type(message))
        if event is None or (self.state, event) not in RECEIVER_TRANSITIONS:
            self.fail(
                BadMessage(self.peer, f"rank {self.peer} sent {type(message).__name__} instead of {self.awaiting}")
            )
            return
        if isinstance(message, Offer) and self.state is ReceiverState.AWAITING:
            names = tuple(header.sequence_id for header in message.headers)
            if names != self._sequence_ids:
                fault = f"rank {self.peer} offers {names} as {self.id}, which is {self._sequence_ids} here"
                self.fail(BadMessage(self.peer, f"{fault}: the ranks have not decided the same moves"))
                return
            self._offered = message.headers
        if isinstance(message, Abort) and not self.ended:
            self.failures.append(RankError(self.peer, f"rank {self.peer} gave up {self.id}: {message.reason}"))
        self._apply(event)

    def fail(self, error: RankError) -> None:
        """Take in what went wrong with the peer or the transport; the table says what follows."""
        self.failures.append(error)
        if self.ended:
            return
        self.gave_up = True
        self._apply(ReceiverEvent.PEER_DEAD if isinstance(error, PeerLost) else ReceiverEvent.GIVE_UP)

    def work(self, may_transfer: bool) -> None:
        """Begin the transfer if it is due and allowed, and notice its end."""
        try:
            if self._data_due and may_transfer:
                self._data_due = False
                tensors = [t for _, reservation in self._reserved for t in reservation.tensors]
                self._transfer = self._ends.transport.recv(
                    tensors, self.peer, self.id.boundary, self._ends.channel.wake
                )
            if self._transfer is None or not self._transfer.done or self.state is not ReceiverState.RECEIVING:
                return
            self._transfer.wait(0)
        except RankError as error:
            self.fail(error)
            return
        self._apply(ReceiverEvent.ARRIVED)

    def outcomes(self) -> list[Outcome]:
        """What has become of each sequence, as far as this side knows."""
        result = _RESULTS.get(self.state, Result.IN_DOUBT)
        why = "" if self.state is ReceiverState.OWNED or not self.failures else str(self.failures[-1])
        return [
            Outcome(sequence_id=name, peer=self.peer, result=Result.NOT_ADOPTED, reason=self._refused[name])
            if name in self._refused
            else Outcome(sequence_id=name, peer=self.peer, result=result, reason=why)
            for name in self._sequence_ids
        ]

    def _apply(self, event: ReceiverEvent) -> None:
        step = RECEIVER_TRANSITIONS[self.state, event]
        self.state = step.state
        for action in step.actions:
            try:
                self._do[action]()
            except RankError as error:
                self.fail(error)
                return

    def _send(self, message: Message) -> None:
        self._ends.channel.send(self.peer, message)

    def _judge(self) -> None:
        store = self._ends.store
        for header in self._offered:
            answer = store.reserve(header)
            if isinstance(answer, Refusal):
                self._refused[header.sequence_id] = answer.reason
            elif fault := layout_fault(header, answer.tensors):
                store.cancel(header, answer)
                self._refused[header.sequence_id] = (
                    f"what rank {self._ends.channel.rank} reserved does not fit: {fault}"
                )
            else:
                self._reserved.append((header, answer))
        self._apply(ReceiverEvent.FITS if self._reserved else ReceiverEvent.FULL)

    def _ask_for_data(self) -> None:
        self._data_due = True

    def _adopt(self) -> None:
        for header, reservation in self._reserved:
            self._ends.store.adopt(header, reservation)

    def _free(self) -> None:
        self._data_due = False
        if self._transfer is not None:
            self._transfer.abandon()
        for header, reservation in self._reserved:
            self._ends.store.cancel(header, reservation)
