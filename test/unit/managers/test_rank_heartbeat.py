"""A rank that falls silent, dies or sends invalid messages ends the engine, and the failure names every such rank."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from heartbeat_process import listening_rank

from sgl_batch.core.topology import Topology
from sgl_batch.distributed.rank_context import RankContext
from sgl_batch.distributed.rank_errors import BadMessage, PeerLost, PeerTimeout
from sgl_batch.distributed.rendezvous import Rendezvous
from sgl_batch.managers.rank_heartbeat import Beat, failure_text


@pytest.mark.parametrize(
    ("error", "beginning"),
    [
        (PeerTimeout([2], awaiting="a sign of life", seconds=8), "rank 2 of the engine hangs: rank 2: waited 8 s"),
        (PeerTimeout([3, 1], awaiting="a sign of life", seconds=8), "ranks 1, 3 of the engine hang: ranks 1, 3: "),
        (PeerLost(1, awaiting="a sign of life", seconds=2), "rank 1 of the engine died: rank 1 closed its connection"),
        (BadMessage(1, "message number 4 of rank 1"), "rank 1 of the engine failed: message number 4"),
        (BadMessage(None, "a message of 3 frames"), "a rank of the engine failed: a message of 3 frames"),
    ],
)
def test_a_failure_names_the_ranks_and_whether_they_died_or_hang(error, beginning):
    assert failure_text(error).startswith(beginning)
    assert "None" not in failure_text(error)


def test_ranks_that_fall_silent_together_are_all_named_and_the_engine_ends(tmp_path):
    with listening_rank(tmp_path, num_ranks=3, timeout_s=1.0) as controller, ThreadPoolExecutor() as threads:
        contexts = [RankContext(rank=rank, topology=Topology.uniform(3), directory=tmp_path) for rank in (1, 2)]
        joining = [threads.submit(context.channel, "heartbeat", Beat) for context in contexts]
        with joining[0].result(), joining[1].result():
            controller.join(timeout=60)
    assert controller.exitcode == -signal.SIGTERM, "the rank that noticed ends the controller, and with it all ranks"
    failure = Rendezvous(tmp_path).failure
    assert failure is not None
    assert failure.text.startswith("ranks 1, 2 of the engine hang: ranks 1, 2: waited 1 s")


def test_a_rank_that_was_stopped_itself_does_not_report_that_others_hang(tmp_path):
    with listening_rank(tmp_path, num_ranks=2, timeout_s=2.0) as controller:
        with RankContext(rank=1, topology=Topology.uniform(2), directory=tmp_path).channel(
            "heartbeat", Beat
        ) as channel:
            (listener,) = psutil.Process(controller.pid).children()
            exchange_beats(channel, 1)
            listener.suspend()
            await_silence(channel, seconds=2.5)
            listener.resume()
            channel.recv([0], timeout_s=60, awaiting="its first beat after the stop")
            exchange_beats(channel, 2)
        controller.join(timeout=60)
    failure = Rendezvous(tmp_path).failure
    assert failure is not None
    assert failure.text.startswith("rank 1 of the engine died"), "it went on until rank 1 closed its connection"


def exchange_beats(channel, number):
    for _ in range(number):
        channel.send(0, Beat())
        channel.recv([0], timeout_s=60, awaiting="its next beat")


def await_silence(channel, seconds):
    try:
        while True:
            channel.recv([0], timeout_s=seconds, awaiting="silence")
    except PeerTimeout:
        return
