"""Owns the sender's side of one batch: it exports, sends and releases, when the protocol says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sgl_batch.distributed.rank_errors import RankError
from sgl_batch.distributed.transport import Transfer
from sgl_batch.migration.endpoints import Endpoints
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
from sgl_batch.migration.protocol import SENDER_END_STATES, SENDER_TRANSITIONS, SenderAction, SenderEvent, SenderState
from sgl_batch.migration.protocol_endpoint import ProtocolEndpoint, Rules
from sgl_batch.migration.store import Export, layout_fault

_RULES = Rules(
    transitions=SENDER_TRANSITIONS,
    events={
        Accept: SenderEvent.ACCEPT,
        Refuse: SenderEvent.REFUSE,
        Stored: SenderEvent.STORED,
        Committed: SenderEvent.COMMITTED,
        Abort: SenderEvent.ABORT,
    },
    give_up=SenderEvent.GIVE_UP,
    peer_dead=SenderEvent.PEER_DEAD,
    before_transfer=frozenset({SenderState.OFFERED}),
    transferring=SenderState.SENDING,
    end_states=SENDER_END_STATES,
    results={
        SenderState.RELEASED: Result.RELEASED,
        SenderState.KEPT: Result.KEPT,
        SenderState.RECLAIMED: Result.RECLAIMED,
    },
    moved=SenderState.RELEASED,
    no_room=Result.KEPT,
)


class SenderEndpoint(ProtocolEndpoint[SenderState, SenderEvent, SenderAction]):
    """The sequences that move from this rank to another rank at one boundary."""

    def __init__(self, batch: MigrationBatchId, sequence_ids: Sequence[str], endpoints: Endpoints) -> None:
        super().__init__(batch, batch.target, sequence_ids, endpoints, _RULES, SenderState.OFFERED)
        self._exports: dict[str, Export] = {}

    def _actions(self) -> Mapping[SenderAction, Callable[[], None]]:
        return {
            SenderAction.SEND_DATA: self._ask_for_data,
            SenderAction.SEND_COMMIT: lambda: self._send(Commit(batch=self.id)),
            SenderAction.SEND_ABORT: self._send_abort,
            SenderAction.STOP_DATA: self._stop_data,
            SenderAction.RELEASE: self._release,
        }

    def start(self) -> None:
        """Export the sequences and offer them."""
        for sequence_id in self._sequence_ids:
            export = self._endpoints.store.export(sequence_id)
            fault = layout_fault(export.header, export.tensors)
            assert fault is None, f"the store exports sequence {sequence_id} with {fault}"
            self._exports[sequence_id] = export
        try:
            self._send(Offer(batch=self.id, headers=[export.header for export in self._exports.values()]))
        except RankError as error:
            self.fail(error)

    def _take_in(self, message: Message) -> str | None:
        if not isinstance(message, Accept | Refuse) or self.state is not SenderState.OFFERED:
            return None
        names = message.refused.keys()
        if not names <= self._exports.keys() or (names == self._exports.keys()) is isinstance(message, Accept):
            return f"rank {self.peer} refuses {sorted(names)} of {self.id}, which has others"
        self._refused = message.refused
        return None

    def _begin_transfer(self) -> Transfer:
        tensors = [t for export in self._accepted() for t in export.tensors]
        return self._endpoints.transport.send(tensors, self.peer, self.id.boundary, self._endpoints.channel.wake)

    def _accepted(self) -> list[Export]:
        return [export for name, export in self._exports.items() if name not in self._refused]

    def _release(self) -> None:
        if self._transfer is not None:  # the receiver has all tensors, so that the transfer ends at once
            try:
                self._transfer.wait(self._endpoints.step_timeout_s)
            except RankError:
                self._transfer.abandon()
        for export in self._accepted():
            self._endpoints.store.release(export.header.sequence_id)
