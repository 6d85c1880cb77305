"""Ranks in real processes, over ZeroMQ and gloo, each with its own store. The test gives them moves and faults."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from injected_faults import Delays, FaultyChannel, FaultyStore, FaultyTransport, Trap
from page_store import NUM_LAYERS, PAGE_SHAPE

from sgl_batch.core.rank_moves import Move
from sgl_batch.distributed.group_transport import GroupTransport
from sgl_batch.distributed.zmq_channel import ZmqChannel
from sgl_batch.migration.endpoints import Endpoints
from sgl_batch.migration.header import SequenceHeader
from sgl_batch.migration.messages import Message
from sgl_batch.migration.migrator import Migrator
from sgl_batch.migration.outcome import MigrationFailed, Outcome, Report, Result

ANSWER_S = 60.0
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch.distributed", "pytest", "sgl_batch.distributed.zmq_channel", "hypothesis"])


@dataclass(slots=True, kw_only=True)
class RankPlan:
    """The sequences of one rank at the start, and the fault that it meets. `copies`: they are replicated, not moved."""

    sequences: dict[str, int] = field(default_factory=dict)
    num_pages: int = 64
    dies_at: str | None = None
    signal_number: int = signal.SIGKILL
    longest_delay_s: float = 0.0
    step_timeout_s: float = 30.0
    num_layers: int = NUM_LAYERS
    page_shape: tuple[int, ...] = PAGE_SHAPE
    copies: bool = False


@dataclass(slots=True, kw_only=True)
class Answer:
    """A rank's report and its sequences after a call. Of copies to several ranks, `outcomes` has the last."""

    outcomes: dict[str, Outcome]
    error: str | None
    seconds: float
    held: dict[str, tuple[SequenceHeader, str]]
    replicas: set[str]
    transfers: list[tuple[str, bool]]


class RankProcess:
    """The test's handle on one rank."""

    def __init__(self, rank: int, num_ranks: int, plan: RankPlan, store_path: str) -> None:
        self.link, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(rank, num_ranks, plan, store_path, theirs))
        self._process.start()
        theirs.close()

    def ask(self, *command: object) -> None:
        self.link.send(command)

    def answer(self) -> Answer:
        assert self.link.poll(ANSWER_S), "a rank does not answer"
        answer = self.link.recv()
        assert isinstance(answer, Answer)
        return answer

    def signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait_for_death(self) -> None:
        self._process.join(ANSWER_S)
        assert self._process.exitcode == -signal.SIGKILL

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.link.close()


@contextmanager
def rank_processes(tmp_path: Path, *plans: RankPlan) -> Iterator[list[RankProcess]]:
    """One process for each plan, connected to all the others."""
    ranks = [RankProcess(rank, len(plans), plan, str(tmp_path / "store")) for rank, plan in enumerate(plans)]
    try:
        endpoints = {rank: process.link.recv() for rank, process in enumerate(ranks)}
        for process in ranks:
            process.link.send(endpoints)
        for process in ranks:
            assert process.link.recv() == "connected"
        yield ranks
    finally:
        for process in ranks:
            process.end()


def run_all(ranks: list[RankProcess], boundary: int, moves: list[Move]) -> list[Answer]:
    """Let all ranks carry out the moves; return their answers."""
    for process in ranks:
        process.ask("run", boundary, moves)
    return [process.answer() for process in ranks]


def _serve(rank: int, num_ranks: int, plan: RankPlan, store_path: str, link: Connection) -> None:
    torch.set_num_threads(1)
    with ZmqChannel[Message](rank=rank, messages=Message, run_id="test", path=Path(f"{store_path}.{rank}")) as channel:
        link.send(channel.endpoint)
        channel.connect(link.recv())
        group = dist.ProcessGroupGloo(dist.FileStore(store_path, num_ranks), rank, num_ranks, timedelta(seconds=120))
        store = FaultyStore(plan.num_pages, num_layers=plan.num_layers, page_shape=plan.page_shape, copies=plan.copies)
        for sequence_id, num_pages in plan.sequences.items():
            store.put(sequence_id, num_pages)
        store.trap = trap = Trap(plan.dies_at, plan.signal_number)
        delays = Delays(rank, plan.longest_delay_s)
        transport = FaultyTransport(GroupTransport(group, range(num_ranks)), trap, delays)
        ends = Endpoints(
            channel=FaultyChannel(channel, trap, delays),
            transport=transport,
            store=store,
            step_timeout_s=plan.step_timeout_s,
        )
        migrator = Migrator(ends, copies=plan.copies)
        link.send("connected")
        calls = {"run": migrator.run, "resume": migrator.resume, "peer_died": migrator.peer_died}
        while True:
            name, *arguments = link.recv()
            if name == "hold":
                link.send(_answer(store, transport, Report(outcomes=()), None, 0.0))
                continue
            begun = time.monotonic()
            try:
                report, error = calls[name](*arguments), None
            except MigrationFailed as failure:
                report, error = failure.report, str(failure)
            link.send(_answer(store, transport, report, error, time.monotonic() - begun))


def _answer(
    store: FaultyStore, transport: FaultyTransport, report: Report, error: str | None, seconds: float
) -> Answer:
    if not any(outcome.result is Result.IN_DOUBT for outcome in report.outcomes):
        store.check_account(reserved=0)
    return Answer(
        outcomes={outcome.sequence_id: outcome for outcome in report.outcomes},
        error=error,
        seconds=seconds,
        held=store.everything(),
        replicas=store.replicas,
        transfers=transport.begun,
    )
