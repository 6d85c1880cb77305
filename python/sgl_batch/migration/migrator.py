"""Owns the migrations of one rank: it runs all batches of a boundary at once. Its caller says which sequences move."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from sgl_batch.core.rank_moves import Move
from sgl_batch.distributed.rank_errors import BadMessage, PeerLost, PeerTimeout, RankError
from sgl_batch.migration.endpoints import Endpoints
from sgl_batch.migration.messages import Message, MigrationBatchId
from sgl_batch.migration.outcome import MigrationFailed, Report
from sgl_batch.migration.receiver import ReceiverEndpoint
from sgl_batch.migration.sender import SenderEndpoint

MigrationBatch = SenderEndpoint | ReceiverEndpoint


class Migrator:
    """Carries out one list of moves on every rank that it concerns. Other ranks may call it too; they return at once.

    All sequences from one rank to another at one boundary are one batch. Batches run concurrently. Between two ranks
    the KV of the batch from the lower rank goes first, so that both begin their transfers in the same order.

    `copies`: the sequences stay where they are, and may go to several ranks at once. The store's `release` then keeps a
    sequence: its sender owns it in every state, and what the receiver adopts is a replica.
    """

    def __init__(self, endpoints: Endpoints, *, copies: bool = False) -> None:
        self._endpoints, self._copies = endpoints, copies
        self._boundary = -1
        self._batches: dict[MigrationBatchId, MigrationBatch] = {}
        self._early: list[tuple[int, Message]] = []
        self._failures: list[RankError] = []
        self._ended: set[MigrationBatchId] = set()

    def run(self, boundary: int, moves: Sequence[Move]) -> Report:
        """Carry out this rank's part of `moves`, and return when each move has ended or is in doubt.

        `boundary` rises from call to call and is the same on all ranks. Raises MigrationFailed when a rank failed; its
        report is as complete as a returned one. Batches in doubt are held, and reported again when a later call has
        resolved them.
        """
        assert boundary > self._boundary, f"boundary {boundary} does not come after boundary {self._boundary}"
        self._boundary = boundary
        self._ended.clear()
        new = self._open(boundary, moves)
        self._batches |= {batch.id: batch for batch in new}
        for batch in new:
            if isinstance(batch, SenderEndpoint):
                batch.start()
        early, self._early = self._early, []
        for peer, message in early:
            self._hand_out(peer, message)
        return self._raise_failures(self._conclude(new))

    def resume(self) -> Report:
        """Wait once more for messages that resolve the batches in doubt. Returns and raises as `run` does."""
        held = list(self._batches.values())
        for batch in held:
            batch.gave_up = False
        return self._raise_failures(self._conclude(held))

    def peer_died(self, rank: int) -> Report:
        """Resolve the batches in doubt with a rank whose process is known to have ended. A suspicion is not enough.

        Returns the report with its failures instead of raising them, because the caller knows of the death.
        """
        held = [batch for batch in self._batches.values() if batch.peer == rank]
        for batch in held:
            batch.fail(PeerLost(rank, awaiting=batch.awaiting, seconds=0))
        return self._report(held)

    def _open(self, boundary: int, moves: Sequence[Move]) -> list[MigrationBatch]:
        rank, endpoints = self._endpoints.channel.rank, self._endpoints
        names: dict[MigrationBatchId, list[str]] = {}
        for move in moves:
            assert move.source != move.target, f"sequence {move.sequence_id} moves from rank {move.source} to itself"
            if rank in (move.source, move.target):
                batch = MigrationBatchId(boundary=boundary, source=move.source, target=move.target)
                names.setdefault(batch, []).append(move.sequence_id)
        listed = [(name, batch.target if self._copies else None) for batch, ids in names.items() for name in ids]
        twice = sorted(name for name, _ in listed)
        assert len(set(listed)) == len(listed), f"a sequence moves twice at boundary {boundary}: {twice}"
        return [
            SenderEndpoint(batch, ids, endpoints) if batch.source == rank else ReceiverEndpoint(batch, ids, endpoints)
            for batch, ids in names.items()
        ]

    def _conclude(self, batches: list[MigrationBatch]) -> Report:
        """Drive the batches until each has ended or was given up, then report."""
        clock = _PeerClocks(self._endpoints.step_timeout_s)
        while True:
            self._work()
            waiting = [batch for batch in batches if not batch.ended and not batch.gave_up]
            if not waiting:
                break
            peers = {batch.peer for batch in waiting}
            left = clock.left({peer: self._progress_with(peer) for peer in peers})
            for batch in waiting:
                if left[batch.peer] <= 0:
                    seconds = self._endpoints.step_timeout_s
                    batch.fail(PeerTimeout([batch.peer], awaiting=batch.awaiting, seconds=seconds))
            if min(left.values()) > 0:
                self._receive(peers, min(left.values()))
        return self._report(batches)

    def _work(self) -> None:
        """Let each batch begin its transfer when it is its turn between the two ranks, and take note of its end."""
        for batch in list(self._batches.values()):
            opposite = self._batches.get(
                MigrationBatchId(boundary=batch.id.boundary, source=batch.id.target, target=batch.id.source)
            )
            batch.work(may_transfer=batch.id.source < batch.id.target or opposite is None or opposite.past_data)

    def _receive(self, peers: Collection[int], timeout_s: float) -> None:
        try:
            received = self._endpoints.channel.recv(peers, timeout_s=timeout_s, awaiting="the next message of a batch")
        except PeerTimeout:
            return  # the clocks decide: they also see the progress of transfers
        except RankError as error:
            self._fail_with(error)
        else:
            if received is not None:
                self._hand_out(*received)

    def _fail_with(self, error: RankError) -> None:
        hit = [batch for batch in self._batches.values() if batch.peer == error.rank]
        if not hit:
            self._failures.append(error)
        for batch in hit:
            if isinstance(error, PeerLost):  # name what each batch was waiting for
                batch.fail(PeerLost(batch.peer, awaiting=batch.awaiting, seconds=error.seconds))
            else:
                batch.fail(error)

    def _hand_out(self, peer: int, message: Message) -> None:
        batch = self._batches.get(message.batch)
        if batch is not None and batch.peer == peer:
            batch.handle(message)
        elif message.batch.boundary > self._boundary:
            self._early.append((peer, message))
        elif message.batch.boundary == self._boundary and message.batch not in self._ended:
            fault = f"rank {peer} sent {type(message).__name__} for {message.batch}, of which rank"
            ours = f"{fault} {self._endpoints.channel.rank} knows nothing: the ranks have not decided the same moves"
            self._fail_with(BadMessage(peer, ours))
        # Otherwise the message is late: its batch has ended here.

    def _progress_with(self, peer: int) -> tuple[object, ...]:
        return tuple(batch.progress for batch in self._batches.values() if batch.peer == peer)

    def _report(self, batches: list[MigrationBatch]) -> Report:
        resolved = [batch for batch in self._batches.values() if batch.ended and batch not in batches]
        shown = [*batches, *resolved]
        failures, self._failures = self._failures, []
        for batch in shown:
            failures += batch.failures
            batch.failures = []
        report = Report(
            outcomes=tuple(outcome for batch in shown for outcome in batch.outcomes()), failures=tuple(failures)
        )
        self._ended |= {name for name, batch in self._batches.items() if batch.ended}
        self._batches = {name: batch for name, batch in self._batches.items() if not batch.ended}
        return report

    @staticmethod
    def _raise_failures(report: Report) -> Report:
        if report.failures:
            raise MigrationFailed(report)
        return report


class _PeerClocks:
    """The time that each peer has left. It begins anew whenever a batch with the peer makes progress."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._last: dict[int, tuple[object, float]] = {}

    def left(self, progress: dict[int, tuple[object, ...]]) -> dict[int, float]:
        """Return the seconds left by peer, given a mark of each peer's progress that differs when it has moved on."""
        now = time.monotonic()
        for peer, mark in progress.items():
            if peer not in self._last or self._last[peer][0] != mark:
                self._last[peer] = (mark, now)
        return {peer: self._last[peer][1] + self._timeout_s - now for peer in progress}
