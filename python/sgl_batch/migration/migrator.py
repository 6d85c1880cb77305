"""Owns the migrations of one rank: runs all lots of a boundary at once. Which sequences move is decided elsewhere."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from sgl_batch.core.rank_agreement import Move
from sgl_batch.distributed.rank_errors import BadMessage, PeerLost, PeerTimeout, RankError
from sgl_batch.migration.ends import Ends
from sgl_batch.migration.messages import LotId, Message
from sgl_batch.migration.outcome import MigrationFailed, Report
from sgl_batch.migration.receiver import ReceiverLot
from sgl_batch.migration.sender import SenderLot

Lot = SenderLot | ReceiverLot


class Migrator:
    """Runs the same list of moves on every rank that it concerns; the others may call in as well, and return at once.

    All sequences from one rank to another at one boundary are one lot. Lots run side by side; between two ranks the KV
    of the lot from the lower rank travels first, so that both begin their transfers in the same order.
    """

    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        self._boundary = -1
        self._lots: dict[LotId, Lot] = {}
        self._early: list[tuple[int, Message]] = []
        self._failures: list[RankError] = []
        self._ended: set[LotId] = set()

    def run(self, boundary: int, moves: Sequence[Move]) -> Report:
        """Carry out this rank's part of `moves`. `boundary` rises from call to call and is the same on all ranks.

        Returns when each of them has ended or is in doubt. Raises MigrationFailed when a rank failed; its report is as
        complete as the one returned. Lots in doubt are held, and reported again when a later call has resolved them.
        """
        assert boundary > self._boundary, f"boundary {boundary} comes after boundary {self._boundary}"
        self._boundary = boundary
        self._ended.clear()
        new = self._open(boundary, moves)
        self._lots |= {lot.id: lot for lot in new}
        for lot in new:
            if isinstance(lot, SenderLot):
                lot.start()
        early, self._early = self._early, []
        for peer, message in early:
            self._hand_out(peer, message)
        return self._raise_failures(self._conclude(new))

    def resume(self) -> Report:
        """Wait once more for messages that resolve what is in doubt; otherwise as `run`."""
        held = list(self._lots.values())
        for lot in held:
            lot.gave_up = False
        return self._raise_failures(self._conclude(held))

    def peer_died(self, rank: int) -> Report:
        """Resolve what is in doubt with a rank whose process is known to have ended. Never on a mere suspicion.

        Returns the report with its failures: the caller knows of them.
        """
        held = [lot for lot in self._lots.values() if lot.peer == rank]
        for lot in held:
            lot.fail(PeerLost(rank, awaiting=lot.awaiting, seconds=0))
        return self._report(held)

    def _open(self, boundary: int, moves: Sequence[Move]) -> list[Lot]:
        rank, ends = self._ends.channel.rank, self._ends
        names: dict[LotId, list[str]] = {}
        for move in moves:
            assert move.source != move.target, f"sequence {move.sequence_id} moves from rank {move.source} to itself"
            if rank in (move.source, move.target):
                lot = LotId(boundary=boundary, source=move.source, target=move.target)
                names.setdefault(lot, []).append(move.sequence_id)
        listed = [name for ids in names.values() for name in ids]
        assert len(set(listed)) == len(listed), f"a sequence moves twice at boundary {boundary}: {sorted(listed)}"
        return [
            SenderLot(lot, ids, ends) if lot.source == rank else ReceiverLot(lot, ids, ends)
            for lot, ids in names.items()
        ]

    def _conclude(self, lots: list[Lot]) -> Report:
        """Drive the lots until each has ended or was given up, then report."""
        clock = _PeerClocks(self._ends.step_timeout_s)
        while True:
            self._work()
            waiting = [lot for lot in lots if not lot.ended and not lot.gave_up]
            if not waiting:
                break
            peers = {lot.peer for lot in waiting}
            left = clock.left({peer: self._progress_with(peer) for peer in peers})
            for lot in waiting:
                if left[lot.peer] <= 0:
                    seconds = self._ends.step_timeout_s
                    lot.fail(PeerTimeout([lot.peer], awaiting=lot.awaiting, seconds=seconds))
            if min(left.values()) > 0:
                self._receive(peers, min(left.values()))
        return self._report(lots)

    def _work(self) -> None:
        """Let each lot begin its transfer, where it is the pair's turn, and notice the end of it."""
        for lot in list(self._lots.values()):
            opposite = self._lots.get(LotId(boundary=lot.id.boundary, source=lot.id.target, target=lot.id.source))
            lot.work(may_transfer=lot.id.source < lot.id.target or opposite is None or opposite.past_data)

    def _receive(self, peers: Collection[int], timeout_s: float) -> None:
        try:
            received = self._ends.channel.recv(peers, timeout_s=timeout_s, awaiting="the next message of a lot")
        except PeerTimeout:
            return  # the clocks, which know of progress that is no message, decide
        except RankError as error:
            self._fail_with(error)
        else:
            if received is not None:
                self._hand_out(*received)

    def _fail_with(self, error: RankError) -> None:
        hit = [lot for lot in self._lots.values() if lot.peer == error.rank]
        if not hit:
            self._failures.append(error)
        for lot in hit:
            if isinstance(error, PeerLost):  # say of each lot what it was waiting for
                lot.fail(PeerLost(lot.peer, awaiting=lot.awaiting, seconds=error.seconds))
            else:
                lot.fail(error)

    def _hand_out(self, peer: int, message: Message) -> None:
        lot = self._lots.get(message.lot)
        if lot is not None and lot.peer == peer:
            lot.handle(message)
        elif message.lot.boundary > self._boundary:
            self._early.append((peer, message))
        elif message.lot.boundary == self._boundary and message.lot not in self._ended:
            fault = f"rank {peer} sent {type(message).__name__} for {message.lot}, of which rank"
            ours = f"{fault} {self._ends.channel.rank} knows nothing: the ranks have not decided the same moves"
            self._fail_with(BadMessage(peer, ours))
        # Else it is late, about a lot that has ended here: there is nothing left to say about it.

    def _progress_with(self, peer: int) -> tuple[object, ...]:
        return tuple(lot.progress for lot in self._lots.values() if lot.peer == peer)

    def _report(self, lots: list[Lot]) -> Report:
        resolved = [lot for lot in self._lots.values() if lot.ended and lot not in lots]
        shown = [*lots, *resolved]
        failures, self._failures = self._failures, []
        for lot in shown:
            failures += lot.failures
            lot.failures = []
        report = Report(
            outcomes=tuple(outcome for lot in shown for outcome in lot.outcomes()), failures=tuple(failures)
        )
        self._ended |= {name for name, lot in self._lots.items() if lot.ended}
        self._lots = {name: lot for name, lot in self._lots.items() if not lot.ended}
        return report

    @staticmethod
    def _raise_failures(report: Report) -> Report:
        if report.failures:
            raise MigrationFailed(report)
        return report


class _PeerClocks:
    """How long each peer may still take: the time limit begins anew whenever something has moved on with it."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._last: dict[int, tuple[object, float]] = {}

    def left(self, progress: dict[int, tuple[object, ...]]) -> dict[int, float]:
        """Seconds left by peer, given what now marks its progress."""
        now = time.monotonic()
        for peer, mark in progress.items():
            if peer not in self._last or self._last[peer][0] != mark:
                self._last[peer] = (mark, now)
        return {peer: self._last[peer][1] + self._timeout_s - now for peer in progress}
