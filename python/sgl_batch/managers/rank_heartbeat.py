"""Owns the thread that notices when another rank has died or hangs, and then ends the engine with that rank's name.

It is a thread of its own because the main thread may be in a collective that would never end. Nothing can be saved.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time

import msgspec
import psutil

from sgl_batch.distributed.rank_context import RankContext
from sgl_batch.distributed.rank_errors import PeerLost, PeerTimeout, RankError
from sgl_batch.distributed.zmq_channel import ZmqChannel

logger = logging.getLogger(__name__)

_BEAT_S = 1.0
# The controller checks its ranks ten times a second, and reports how one has ended. This long it is waited for.
_AWAIT_REPORT_S = 1.0


class Beat(msgspec.Struct, tag="beat", array_like=True, frozen=True):
    """Says that the sender's process runs."""


def failure_text(error: RankError) -> str:
    """Return the engine's message for a failure: the ranks that it concerns, and whether they died, hang or failed."""
    ranks = error.ranks if isinstance(error, PeerTimeout) else () if error.rank is None else (error.rank,)
    several = len(ranks) > 1
    who = f"{'ranks' if several else 'rank'} {', '.join(map(str, ranks))}" if ranks else "a rank"
    silent = "hang" if several else "hangs"
    what = silent if isinstance(error, PeerTimeout) else "died" if isinstance(error, PeerLost) else "failed"
    return f"{who} of the engine {what}: {error}"


class RankHeartbeat:
    """Sends a beat to every other rank each second. A rank that sends none for `timeout_s` hangs."""

    def __init__(self, rank_context: RankContext, timeout_s: float) -> None:
        self._rank_context, self._timeout_s = rank_context, timeout_s
        self._channel: ZmqChannel[Beat] = rank_context.channel("heartbeat", Beat)
        self._thread = threading.Thread(target=self._run, name="rank heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread. From now on a rank that fails ends this process."""
        self._thread.start()

    def _run(self) -> None:
        try:
            self._beat()
        except RankError as error:
            self._end(error)

    def _beat(self) -> None:
        last_beat = dict.fromkeys(self._rank_context.others, time.monotonic())
        next_beat, last = 0.0, time.monotonic()
        while True:
            now = time.monotonic()
            if now - last > 2 * _BEAT_S:  # this process was stopped, so the others' beats lie unread
                last_beat = {peer: since + now - last for peer, since in last_beat.items()}
            last = now
            if now >= next_beat:
                next_beat = now + _BEAT_S
                for peer in last_beat:
                    self._channel.send(peer, Beat())
            silent = [peer for peer, since in last_beat.items() if now - since > self._timeout_s]
            if silent:
                raise PeerTimeout(silent, awaiting="a sign of life", seconds=self._timeout_s)
            try:
                received = self._channel.recv(list(last_beat), timeout_s=_BEAT_S / 2, awaiting="a sign of life")
            except PeerTimeout:
                continue
            if received is not None:
                last_beat[received[0]] = time.monotonic()

    def _end(self, error: RankError) -> None:
        if isinstance(error, PeerLost):  # the controller knows how that rank's process has ended
            self._rank_context.rendezvous.await_failure(_AWAIT_REPORT_S)
        self._rank_context.rendezvous.report_failure(failure_text(error))
        logger.error("rank %d ends because %s", self._rank_context.rank, error)
        # The controller is this process's parent. When it ends, all ranks end with it, and the engine's own process
        # learns of it at once.
        controller = multiprocessing.parent_process()
        assert controller is not None, "a rank runs in a child process"
        psutil.Process(controller.pid).terminate()
        os.kill(os.getpid(), signal.SIGKILL)
