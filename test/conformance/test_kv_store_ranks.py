"""Ranks of a machine share a store: blocks go from rank to rank, and a killed rank never stops the others."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from store_cases import NUM_PAGES, Form, PlainPool, prepared

from sgl_batch.errors import ConfigError
from sgl_batch.kv_offload.host_kv_store import HostKVStore
from sgl_batch.kv_offload.native_copy_engine import NativeCopyEngine
from sgl_batch.kv_offload.rank_process import is_running, process_start
from sgl_batch.kv_offload.store_errors import StoreFault
from sgl_batch.kv_offload.store_geometry import StoreGeometry

pytest.importorskip("sgl_batch_kernel.kv_store")
POOL: dict[str, Any] = {"layers": 3, "part_bytes": (1 << 16, 1 << 16)}
GEOMETRY = StoreGeometry(num_layers=3, part_bytes=(1 << 16, 1 << 16), checksums=True)


class RankProcess:
    """A second rank as a process: `start` gives it a task, `kill` kills it while it runs."""

    def __init__(self) -> None:
        script = Path(__file__).parent / "store_rank.py"
        self._process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._child = 0

    def start(self, do: str, store: HostKVStore, *, pool: dict[str, Any] = POOL, rank: int = 1) -> list[int]:
        """Start a task as that rank; return the blocks that the process names once it is running."""
        address = dataclasses.asdict(store.address)
        checksums = store.geometry.checksums
        command = {"do": do, "address": address, "pool": pool, "checksums": checksums, "rank": rank}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        reply = json.loads(self._process.stdout.readline())
        self._child = reply["pid"]
        blocks: list[int] = reply["blocks"]
        return blocks

    def kill(self) -> None:
        """Send SIGKILL; return when no thread is left."""
        start = process_start(self._child)
        os.kill(self._child, signal.SIGKILL)
        limit = time.monotonic() + 60
        while is_running(self._child, start):
            assert time.monotonic() < limit
            os.sched_yield()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def other_rank() -> Iterator[RankProcess]:
    process = RankProcess()
    yield process
    process.close()


@pytest.fixture(params=["shared", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HostKVStore]:
    form = Form(request.param, 1)
    with form.store(GEOMETRY, tmp_path, num_blocks=60, num_ranks=2) as store:
        yield store


def test_another_ranks_blocks_can_be_shared_and_outlive_that_rank(store: HostKVStore, other_rank: RankProcess) -> None:
    blocks = other_rank.start("hold", store)
    with pytest.raises(StoreFault, match="this rank holds no reference"):
        store.free(blocks)
    store.share(blocks)
    assert store.references(blocks).tolist() == [3, 2, 2, 2, 2]
    other_rank.kill()
    assert store.reclaim(1) == 5, "the WRITING blocks are freed; this rank holds the others too"
    assert store.references(blocks).tolist() == [1] * 5
    pool = PlainPool.random(**POOL)
    engine = NativeCopyEngine(store, pool)
    engine.load_pages(range(3), blocks, range(10, 15)).wait()
    for page in range(5):
        assert all((new == old).all() for new, old in zip(pool.page(10 + page), pool.page(page), strict=True))
    engine.close()
    store.free(blocks)
    assert store.counts().free == store.num_blocks


def test_a_running_rank_cannot_be_reclaimed_or_joined_again(store: HostKVStore, other_rank: RankProcess) -> None:
    other_rank.start("hold", store)
    with pytest.raises(StoreFault, match=r"rank 1 still runs as process \d+"):
        store.reclaim(1)
    with pytest.raises(StoreFault, match=r"rank 1 is process \d+ already"):
        HostKVStore.join(store.address, GEOMETRY, rank=1)
    other_rank.kill()
    assert store.reclaim(1) == 10
    assert store.reclaim(1) == 0


def test_a_restarted_rank_holds_no_blocks_of_its_earlier_process(store: HostKVStore, other_rank: RankProcess) -> None:
    other_rank.start("hold", store)
    other_rank.kill()
    assert store.counts().used == 10
    with HostKVStore.join(store.address, GEOMETRY, rank=1) as again:
        assert again.counts().used == 0
        prepared(again, 3)
        assert store.counts().writing == 3
    assert store.counts().used == 0


def test_a_rank_killed_while_it_changes_the_table_blocks_no_other(tmp_path: Path, other_rank: RankProcess) -> None:
    drawn = random.Random(5)
    small: dict[str, Any] = {"layers": 1, "part_bytes": (64,), "pages": 8}
    geometry = StoreGeometry.of_pool(PlainPool.random(**small))
    with Form("shared", 1).store(geometry, tmp_path, num_blocks=100_000, num_ranks=3) as store:
        own = prepared(store, 100)
        store.complete_store(own)
        for _ in range(1000):
            other_rank.start("change", store, pool=small, rank=2)
            # This rank's calls run between the other's. Then the other runs alone for a while: otherwise it would be
            # killed while it waits for this rank's last call, and not in the middle of a change.
            for _ in range(drawn.randint(1, 5)):
                store.share(own)
                store.free(own)
            until = time.perf_counter() + drawn.uniform(0.001, 0.003)
            while time.perf_counter() < until:
                os.sched_yield()
            other_rank.kill()
            store.audit()
            store.reclaim(2)
            store.audit()
            assert store.counts().ready == 100
            assert store.references(own).tolist() == [1] * 100
            store.free(prepared(store, 99_900))
            if store.counts().recoveries == 20:
                break
        assert store.counts().recoveries == 20, "the other rank was never killed in the middle of a change"


def test_a_rank_killed_while_it_writes_damages_no_other_ranks_pages(
    store: HostKVStore, other_rank: RankProcess
) -> None:
    pool = PlainPool.random(**POOL)
    engine = NativeCopyEngine(store, pool, num_workers=2)
    for turn in range(4):
        blocks = other_rank.start("write", store)
        own = prepared(store, 20)
        assert not set(own.tolist()) & set(blocks)
        tickets = [engine.store_pages(range(3), range(20), own) for _ in range(1 + turn)]
        other_rank.kill()
        for ticket in tickets:
            ticket.wait()
        store.complete_store(own)
        assert store.reclaim(1) == 20
        taken = prepared(store, 40)
        engine.store_pages(range(3), range(NUM_PAGES), taken).wait()
        engine.load_pages(range(3), own, range(20, 40)).wait()
        for page in range(20):
            assert all((new == old).all() for new, old in zip(pool.page(20 + page), pool.page(page), strict=True))
        store.free(own)
        store.free(taken)
    engine.close()


def test_ranks_with_other_pages_cannot_join(store: HostKVStore) -> None:
    for geometry in (
        dataclasses.replace(GEOMETRY, num_layers=2),
        dataclasses.replace(GEOMETRY, part_bytes=(1 << 16, 1 << 15)),
        dataclasses.replace(GEOMETRY, checksums=False),
    ):
        with pytest.raises(StoreFault, match="made for other pages"):
            HostKVStore.join(store.address, geometry, rank=1)
    with pytest.raises(StoreFault, match="rank 2 of 2"):
        HostKVStore.join(store.address, GEOMETRY, rank=2)


def test_a_store_that_is_closed_cannot_be_joined(tmp_path: Path) -> None:
    with Form("shared", 1).store(GEOMETRY, tmp_path, num_blocks=4, num_ranks=2) as store:
        address = store.address
    with pytest.raises(ConfigError, match=r"rank 1 cannot open the host KV store .* has to be alive"):
        HostKVStore.join(address, GEOMETRY, rank=1)


def test_a_store_of_one_rank_in_memory_has_no_address(tmp_path: Path) -> None:
    with (
        Form("memory", 1).store(GEOMETRY, tmp_path, num_blocks=4) as store,
        pytest.raises(StoreFault, match="one rank"),
    ):
        _ = store.address
