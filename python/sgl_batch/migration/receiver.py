"""Owns the receiver's side of one batch: it reserves, receives and adopts, when the protocol says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sgl_batch.distributed.transport import Transfer
from sgl_batch.migration.endpoints import Endpoints
from sgl_batch.migration.header import SequenceHeader
from sgl_batch.migration.messages import (
    Abort,
    Accept,
    Commit,
    Committed,
    Message,
    MigrationBatchId,
    Offer,
    Refuse,
    Stored,
)
from sgl_batch.migration.outcome import Result
from sgl_batch.migration.protocol import (
    RECEIVER_END_STATES,
    RECEIVER_TRANSITIONS,
    ReceiverAction,
    ReceiverEvent,
    ReceiverState,
)
from sgl_batch.migration.protocol_endpoint import ProtocolEndpoint, Rules
from sgl_batch.migration.store import Refusal, Reservation, layout_fault

_RULES = Rules(
    transitions=RECEIVER_TRANSITIONS,
    events={Offer: ReceiverEvent.OFFER, Commit: ReceiverEvent.COMMIT, Abort: ReceiverEvent.ABORT},
    give_up=ReceiverEvent.GIVE_UP,
    peer_dead=ReceiverEvent.PEER_DEAD,
    before_transfer=frozenset({ReceiverState.AWAITING, ReceiverState.JUDGING}),
    transferring=ReceiverState.RECEIVING,
    end_states=RECEIVER_END_STATES,
    results={ReceiverState.OWNED: Result.ADOPTED, ReceiverState.DROPPED: Result.NOT_ADOPTED},
    moved=ReceiverState.OWNED,
    no_room=Result.NOT_ADOPTED,
)


class ReceiverEndpoint(ProtocolEndpoint[ReceiverState, ReceiverEvent, ReceiverAction]):
    """The sequences that move to this rank from another rank at one boundary."""

    def __init__(self, batch: MigrationBatchId, sequence_ids: Sequence[str], endpoints: Endpoints) -> None:
        super().__init__(batch, batch.source, sequence_ids, endpoints, _RULES, ReceiverState.AWAITING)
        self._offered: list[SequenceHeader] = []
        self._reserved: list[tuple[SequenceHeader, Reservation]] = []

    def _actions(self) -> Mapping[ReceiverAction, Callable[[], None]]:
        return {
            ReceiverAction.JUDGE: self._judge,
            ReceiverAction.SEND_ACCEPT: lambda: self._send(Accept(batch=self.id, refused=self._refused)),
            ReceiverAction.SEND_REFUSE: lambda: self._send(Refuse(batch=self.id, refused=self._refused)),
            ReceiverAction.RECEIVE_DATA: self._ask_for_data,
            ReceiverAction.SEND_STORED: lambda: self._send(Stored(batch=self.id)),
            ReceiverAction.ADOPT: self._adopt,
            ReceiverAction.SEND_COMMITTED: lambda: self._send(Committed(batch=self.id)),
            ReceiverAction.SEND_ABORT: self._send_abort,
            ReceiverAction.FREE: self._free,
        }

    def _take_in(self, message: Message) -> str | None:
        if not isinstance(message, Offer) or self.state is not ReceiverState.AWAITING:
            return None
        names = tuple(header.sequence_id for header in message.headers)
        if names != self._sequence_ids:
            fault = f"rank {self.peer} offers {names} as {self.id}, which is {self._sequence_ids} here"
            return f"{fault}: the ranks have not decided the same moves"
        self._offered = message.headers
        return None

    def _begin_transfer(self) -> Transfer:
        tensors = [t for _, reservation in self._reserved for t in reservation.tensors]
        return self._endpoints.transport.recv(tensors, self.peer, self.id.boundary, self._endpoints.channel.wake)

    def _transferred(self) -> None:
        self._apply(ReceiverEvent.ARRIVED)

    def _judge(self) -> None:
        store = self._endpoints.store
        for header in self._offered:
            answer = store.reserve(header)
            if isinstance(answer, Refusal):
                self._refused[header.sequence_id] = answer.reason
            elif fault := layout_fault(header, answer.tensors):
                store.cancel(header, answer)
                self._refused[header.sequence_id] = (
                    f"the pages that rank {self._endpoints.channel.rank} reserved do not fit: {fault}"
                )
            else:
                self._reserved.append((header, answer))
        self._apply(ReceiverEvent.FITS if self._reserved else ReceiverEvent.FULL)

    def _adopt(self) -> None:
        for header, reservation in self._reserved:
            self._endpoints.store.adopt(header, reservation)

    def _free(self) -> None:
        self._stop_data()
        for header, reservation in self._reserved:
            self._endpoints.store.cancel(header, reservation)
