"""Owns noticing that another rank has died or hangs, in a thread of its own, and ending this engine then, by name.

The main thread may stand in a collective that would never end; nothing can be saved in it.
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
# The controller looks at its ranks ten times a second.
_CONTROLLER_TELLS_S = 1.0


class Beat(msgspec.Struct, tag="beat", array_like=True, frozen=True):
    """The sender's process runs."""


def failure_text(error: RankError) -> str:
    """What the engine says of a failure: every rank that it concerns, and what has become of them."""
    ranks = error.ranks if isinstance(error, PeerTimeout) else () if error.rank is None else (error.rank,)
    several = len(ranks) > 1
    who = f"{'ranks' if several else 'rank'} {', '.join(map(str, ranks))}" if ranks else "a rank"
    silent = "hang" if several else "hangs"
    what = silent if isinstance(error, PeerTimeout) else "died" if isinstance(error, PeerLost) else "failed"
    return f"{who} of the engine {what}: {error}"


class RankHeartbeat:
    """Beats to every other rank each second. A rank unheard of for `timeout_s` hangs."""

    def __init__(self, rank_context: RankContext, timeout_s: float) -> None:
        self._rank_context, self._timeout_s = rank_context, timeout_s
        self._channel: ZmqChannel[Beat] = rank_context.channel("heartbeat", Beat)
        self._thread = threading.Thread(target=self._run, name="rank heartbeat", daemon=True)

    def start(self) -> None:
        """Begin; from now on a failing rank ends this process."""
        self._thread.start()

    def _run(self) -> None:
        try:
            self._beat()
        except RankError as error:
            self._end(error)

    def _beat(self) -> None:
        heard = dict.fromkeys(self._rank_context.others, time.monotonic())
        next_beat, last = 0.0, time.monotonic()
        while True:
            now = time.monotonic()
            if now - last > 2 * _BEAT_S:  # this process stood still, and what it has not read is nobody's silence
                heard = {peer: since + now - last for peer, since in heard.items()}
            last = now
            if now >= next_beat:
                next_beat = now + _BEAT_S
                for peer in heard:
                    self._channel.send(peer, Beat())
            silent = [peer for peer, since in heard.items() if now - since > self._timeout_s]
            if silent:
                raise PeerTimeout(silent, awaiting="a sign of life", seconds=self._timeout_s)
            try:
                received = self._channel.recv(list(heard), timeout_s=_BEAT_S / 2, awaiting="a sign of life")
            except PeerTimeout:
                continue
            if received is not None:
                heard[received[0]] = time.monotonic()

    def _end(self, error: RankError) -> None:
        if isinstance(error, PeerLost):  # the controller knows how that rank's process has ended
            self._rank_context.rendezvous.await_failure(_CONTROLLER_TELLS_S)
        self._rank_context.rendezvous.report_failure(failure_text(error))
        logger.error("rank %d ends because %s", self._rank_context.rank, error)
        # The controller has asked for this process: when it ends, all ranks end with it, and the engine's own process
        # learns of it at once.
        controller = multiprocessing.parent_process()
        assert controller is not None, "this is no child process"
        psutil.Process(controller.pid).terminate()
        os.kill(os.getpid(), signal.SIGKILL)
