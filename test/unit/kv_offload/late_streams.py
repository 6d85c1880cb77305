"""A GPU's copy streams without a GPU: copies are made as late as the waits allow, or as soon as they are given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sgl_batch.kv_offload.cuda_copy_engine import MAX_TICKETS, CudaCopyEngine
from sgl_batch.kv_offload.host_kv_store import HostKVStore
from sgl_batch.kv_offload.page_copies import PerPageCopy
from sgl_batch.kv_offload.store_geometry import PagedPool


class Event:
    """An event after the first `count` pieces of a stream's work."""

    def __init__(self, stream: Stream, count: int) -> None:
        self._stream, self._count = stream, count

    def query(self) -> bool:
        return self._stream.done >= self._count

    def synchronize(self) -> None:
        self._stream.run(self._count)


class Stream:
    """A stream: work in the order in which it was given."""

    def __init__(self) -> None:
        self.done = 0
        self._work: list[Callable[[], None]] = []

    def add(self, work: Callable[[], None]) -> None:
        self._work.append(work)

    def mark(self) -> Event:
        return Event(self, len(self._work))

    def run(self, count: int) -> None:
        while self.done < count:
            self.done += 1
            self._work[self.done - 1]()


class LateStreams:
    """DeviceStreams. The test computes, at once."""

    def __init__(self, *, late: bool) -> None:
        self._late = late
        self._streams = {to_store: Stream() for to_store in (False, True)}
        self._current: Stream | None = None

    def pin(self, memory: torch.Tensor, block_bytes: int) -> None: ...

    def unpin(self, memory: torch.Tensor, block_bytes: int) -> None: ...

    @contextmanager
    def follow(self, to_store: bool, others: Iterable[Any]) -> Iterator[None]:
        self._current = self._streams[to_store]
        for event in others:
            self._current.add(event.synchronize)
        yield
        if not self._late:
            self._current.mark().synchronize()

    def mark(self, to_store: bool) -> Event:
        return self._streams[to_store].mark()

    def compute_waits(self, event: Any) -> None:
        event.synchronize()

    def give(self, work: Callable[[], None]) -> None:
        assert self._current is not None
        self._current.add(work)


class LateEngines:
    """CopyEngines over these streams."""

    def __init__(self, store: HostKVStore, *, late: bool) -> None:
        self._store, self._streams = store, LateStreams(late=late)

    def engine_for(self, pool: PagedPool) -> CudaCopyEngine:
        parts = [[part.flatten(1).view(torch.uint8) for part in pool.page_parts(n)] for n in range(pool.layer_num)]
        blocks = self._store.memory().view(self._store.num_blocks, self._store.geometry.block_bytes)
        make = PerPageCopy(parts, blocks, self._store.geometry)

        def copies(*what: Any) -> None:
            self._streams.give(lambda: make(*what))

        shape = pool.layer_num, len(parts[0][0])
        return CudaCopyEngine(self._store, copies, self._streams, shape, max_tickets=MAX_TICKETS)

    def close(self) -> None: ...
