#!/usr/bin/env python
"""Owns the measurement of migration: sequences cross between two processes of this machine, over gloo."""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from sgl_batch.core.rank_moves import Move
from sgl_batch.distributed.group_transport import GroupTransport
from sgl_batch.distributed.zmq_channel import ZmqChannel
from sgl_batch.migration.endpoints import Endpoints
from sgl_batch.migration.header import SequenceHeader
from sgl_batch.migration.messages import Message
from sgl_batch.migration.migrator import Migrator
from sgl_batch.migration.store import Export, Refusal, Reservation


class PoolStore:
    """Sequences in a page pool [num_pages, heads, tokens, dim] for keys and values of each layer."""

    def __init__(self, options: argparse.Namespace) -> None:
        shape = (options.heads, options.page_size, options.head_dim)
        self.page_shape, self.num_layers = shape, options.layers
        num_pages = options.sequences * options.pages
        self._pools = [torch.ones(num_pages, *shape, dtype=torch.bfloat16) for _ in range(2 * options.layers)]
        self._free = list(range(num_pages))
        self._pages: dict[str, list[int]] = {}
        self._expected: dict[str, list[int]] = {}
        self._headers: dict[str, SequenceHeader] = {}

    def put(self, sequence_id: str, num_pages: int) -> None:
        num_tokens = num_pages * self.page_shape[1]
        self._headers[sequence_id] = SequenceHeader(
            sequence_id=sequence_id,
            prompt_tokens=list(range(num_tokens // 2)),
            generated_tokens=list(range(num_tokens - num_tokens // 2)),
            seed=7,
            sampling={"temperature": 0.7},
            progress={},
            position=num_tokens,
            num_pages=num_pages,
            num_layers=self.num_layers,
            page_shapes=(self.page_shape, self.page_shape),
            page_dtype="bfloat16",
        )
        self._pages[sequence_id] = [self._free.pop() for _ in range(num_pages)]

    def _views(self, pages: list[int]) -> list[torch.Tensor]:
        return [pool[page] for pool in self._pools for page in pages]

    def export(self, sequence_id: str) -> Export:
        return Export(header=self._headers[sequence_id], tensors=self._views(self._pages[sequence_id]))

    def reserve(self, header: SequenceHeader) -> Reservation | Refusal:
        self._expected[header.sequence_id] = pages = [self._free.pop() for _ in range(header.num_pages)]
        return Reservation(tensors=self._views(pages))

    def adopt(self, header: SequenceHeader, reservation: Reservation) -> None:
        self._headers[header.sequence_id] = header
        self._pages[header.sequence_id] = self._expected.pop(header.sequence_id)

    def cancel(self, header: SequenceHeader, reservation: Reservation) -> None:
        self._free += self._expected.pop(header.sequence_id)

    def release(self, sequence_id: str) -> None:
        del self._headers[sequence_id]
        self._free += self._pages.pop(sequence_id)


def rank_main(rank: int, options: argparse.Namespace, directory: str, link: Connection) -> None:
    """Run one of the two ranks: the sequences begin on rank 0, and move to the other rank once in each round."""
    torch.set_num_threads(1)
    with ZmqChannel[Message](
        rank=rank, messages=Message, run_id="benchmark", path=Path(directory) / str(rank)
    ) as channel:
        link.send(channel.endpoint)
        channel.connect(link.recv())
        group = dist.ProcessGroupGloo(dist.FileStore(f"{directory}/store", 2), rank, 2, timedelta(seconds=600))
        store = PoolStore(options)
        names = [f"s{number}" for number in range(options.sequences)]
        if rank == 0:
            for name in names:
                store.put(name, options.pages)
        ends = Endpoints(channel=channel, transport=GroupTransport(group, range(2)), store=store, step_timeout_s=60)
        migrator = Migrator(ends)
        seconds = []
        for boundary in range(options.rounds + 2):  # the first two write the pages of both pools
            group.barrier().wait()
            begun = time.monotonic()
            source = boundary % 2
            migrator.run(boundary, [Move(sequence_id=name, source=source, target=1 - source) for name in names])
            seconds.append(time.monotonic() - begun)
        link.send(seconds[2:])


def measure(options: argparse.Namespace) -> list[float]:
    """Return the seconds of each round, of the slower rank."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    with tempfile.TemporaryDirectory() as directory:
        ranks = [
            context.Process(target=rank_main, args=(rank, options, directory, theirs))
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(ranks, pipes, strict=True):
            process.start()
            theirs.close()
        ours = [link for link, _ in pipes]
        endpoints = {rank: link.recv() for rank, link in enumerate(ours)}
        for link in ours:
            link.send(endpoints)
        seconds = [link.recv() for link in ours]
        for process in ranks:
            process.join()
    return [max(both) for both in zip(*seconds, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequences", type=int, default=20, help="how many cross at once (20)")
    parser.add_argument("--pages", type=int, default=10, help="pages of each (10)")
    parser.add_argument("--page-size", type=int, default=64, help="tokens of a page (64)")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=2, help="KV heads (2)")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    page_bytes = 2 * options.layers * options.heads * options.page_size * options.head_dim * 2
    mib = options.pages * page_bytes / 2**20
    each_ms = sorted(1e3 * seconds / options.sequences for seconds in measure(options))
    median = statistics.median(each_ms)
    print(
        f"{options.sequences} sequences of {options.pages} pages, {mib:.1f} MiB of bfloat16 KV each: "
        f"{median:.2f} ms a sequence (median of {options.rounds} rounds, {each_ms[0]:.2f} to {each_ms[-1]:.2f}), "
        f"{mib / 1024 / (median / 1e3):.2f} GiB/s"
    )


if __name__ == "__main__":
    main()
