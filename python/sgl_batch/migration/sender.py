"""Owns the sender's side of one lot: does what the protocol's table says. Decides neither moves nor ownership."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_batch.distributed.rank_errors import BadMessage, PeerLost, RankError
from sgl_batch.distributed.transport import Transfer
from sgl_batch.migration.ends import Ends
from sgl_batch.migration.messages import Abort, Accept, Commit, Committed, LotId, Message, Offer, Refuse, Stored
from sgl_batch.migration.outcome import Outcome, Result
from sgl_batch.migration.protocol import (
    SENDER_ENDS,
    SENDER_TRANSITIONS,
    SenderAction,
    SenderEvent,
    SenderState,
)
from sgl_batch.migration.store import Export, layout_fault

_EVENTS: dict[type[Message], SenderEvent] = {
    Accept: SenderEvent.ACCEPT,
    Refuse: SenderEvent.REFUSE,
    Stored: SenderEvent.STORED,
    Committed: SenderEvent.COMMITTED,
    Abort: SenderEvent.ABORT,
}
_RESULTS = {
    SenderState.RELEASED: Result.RELEASED,
    SenderState.KEPT: Result.KEPT,
    SenderState.RECLAIMED: Result.RECLAIMED,
}


class SenderLot:
    """The sequences that go from this rank to one other at one boundary."""

    def __init__(self, lot: LotId, sequence_ids: Sequence[str], ends: Ends) -> None:
        self.id, self.peer = lot, lot.target
        self.state = SenderState.OFFERED
        self.failures: list[RankError] = []
        self.gave_up = False
        self._ends = ends
        self._sequence_ids = tuple(sequence_ids)
        self._exports: dict[str, Export] = {}
        self._refused: dict[str, str] = {}
        self._transfer: Transfer | None = None
        self._data_due = False
        self._do = {
            SenderAction.SEND_DATA: self._ask_for_data,
            SenderAction.SEND_COMMIT: lambda: self._send(Commit(lot=lot)),
            SenderAction.SEND_ABORT: lambda: self._send(Abort(lot=lot, reason=str(self.failures[-1]))),
            SenderAction.STOP_DATA: self._stop_data,
            SenderAction.RELEASE: self._release,
        }

    @property
    def ended(self) -> bool:
        return self.state in SENDER_ENDS

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
        return self.state not in (SenderState.OFFERED, SenderState.SENDING)

    def start(self) -> None:
        """Export the sequences and offer them."""
        for sequence_id in self._sequence_ids:
            export = self._ends.store.export(sequence_id)
            fault = layout_fault(export.header, export.tensors)
            assert fault is None, f"the store exports sequence {sequence_id} with {fault}"
            self._exports[sequence_id] = export
        try:
            self._send(Offer(lot=self.id, headers=[export.header for export in self._exports.values()]))
        except RankError as error:
            self.fail(error)

    def handle(self, message: Message) -> None:
        """Take in a message of the receiver."""
        event = _EVENTS.get(type(message))
        if event is None or (self.state, event) not in SENDER_TRANSITIONS:
            self.fail(
                BadMessage(self.peer, f"rank {self.peer} sent {type(message).__name__} instead of {self.awaiting}")
            )
            return
        if isinstance(message, Accept | Refuse) and self.state is SenderState.OFFERED:
            names = message.refused.keys()
            if not names <= self._exports.keys() or (names == self._exports.keys()) is isinstance(message, Accept):
                self.fail(
                    BadMessage(self.peer, f"rank {self.peer} refuses {sorted(names)} of {self.id}, which has others")
                )
                return
            self._refused = message.refused
        if isinstance(message, Abort) and not self.ended:
            self.failures.append(RankError(self.peer, f"rank {self.peer} gave up {self.id}: {message.reason}"))
        self._apply(event)

    def fail(self, error: RankError) -> None:
        """Take in what went wrong with the peer or the transport; the table says what follows."""
        self.failures.append(error)
        if self.ended:
            return
        self.gave_up = True
        self._apply(SenderEvent.PEER_DEAD if isinstance(error, PeerLost) else SenderEvent.GIVE_UP)

    def work(self, may_transfer: bool) -> None:
        """Begin the transfer if it is due and allowed, and notice its failure."""
        try:
            if self._data_due and may_transfer:
                self._data_due = False
                tensors = [t for export in self._accepted() for t in export.tensors]
                self._transfer = self._ends.transport.send(
                    tensors, self.peer, self.id.boundary, self._ends.channel.wake
                )
            if self._transfer is not None and self._transfer.done and self.state is SenderState.SENDING:
                self._transfer.wait(0)
        except RankError as error:
            self.fail(error)

    def outcomes(self) -> list[Outcome]:
        """What has become of each sequence, as far as this side knows."""
        result = _RESULTS.get(self.state, Result.IN_DOUBT)
        why = "" if self.state is SenderState.RELEASED or not self.failures else str(self.failures[-1])
        return [
            Outcome(sequence_id=name, peer=self.peer, result=Result.KEPT, reason=self._refused[name])
            if name in self._refused
            else Outcome(sequence_id=name, peer=self.peer, result=result, reason=why)
            for name in self._sequence_ids
        ]

    def _apply(self, event: SenderEvent) -> None:
        step = SENDER_TRANSITIONS[self.state, event]
        self.state = step.state
        for action in step.actions:
            try:
                self._do[action]()
            except RankError as error:
                self.fail(error)
                return

    def _accepted(self) -> list[Export]:
        return [export for name, export in self._exports.items() if name not in self._refused]

    def _send(self, message: Message) -> None:
        self._ends.channel.send(self.peer, message)

    def _ask_for_data(self) -> None:
        self._data_due = True

    def _stop_data(self) -> None:
        self._data_due = False
        if self._transfer is not None:
            self._transfer.abandon()

    def _release(self) -> None:
        if self._transfer is not None:  # the receiver has everything, so the transfer ends now if it has not
            try:
                self._transfer.wait(self._ends.step_timeout_s)
            except RankError:
                self._transfer.abandon()
        for export in self._accepted():
            self._ends.store.release(export.header.sequence_id)
