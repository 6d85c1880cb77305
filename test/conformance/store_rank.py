"""A rank of a host KV store as a process of its own, for tests that kill it; each command forks a new one.

A command is a line of JSON on standard input: the task, the rank and the store's address. The child writes a line when
its task is running, and runs until it is killed; then its parent takes the next command.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from store_cases import PlainPool, prepared

from sgl_batch.kv_offload.host_kv_store import HostKVStore, StoreAddress
from sgl_batch.kv_offload.native_copy_engine import NativeCopyEngine
from sgl_batch.kv_offload.store_geometry import StoreGeometry

Report = Callable[[list[int]], None]


def hold(store: HostKVStore, pool: PlainPool, report: Report) -> None:
    """Hold five READY blocks with pages 0 to 4, five WRITING ones, and a second reference to the first."""
    engine = NativeCopyEngine(store, pool)
    blocks = prepared(store, 5)
    engine.store_pages(range(pool.layer_num), range(5), blocks).wait()
    store.complete_store(blocks)
    store.share(blocks[:1])
    prepared(store, 5)
    report(blocks.tolist())
    signal.pause()


def change(store: HostKVStore, pool: PlainPool, report: Report) -> None:
    """Change the table without a pause: take and free half of the store again and again."""
    blocks = prepared(store, store.num_blocks // 2)
    store.free(blocks)
    report([])
    while True:
        blocks = prepared(store, store.num_blocks // 2)
        store.complete_store(blocks)
        store.share(blocks)
        store.free(blocks)
        store.free(blocks)


def write(store: HostKVStore, pool: PlainPool, report: Report) -> None:
    """Copy without a pause, with two workers and several tickets in the queue."""
    engine = NativeCopyEngine(store, pool, num_workers=2, max_tickets=8)
    blocks = prepared(store, 20)
    engine.store_pages(range(pool.layer_num), range(20), blocks).wait()
    report(blocks.tolist())
    while True:
        engine.store_pages(range(pool.layer_num), range(20), blocks)


def main() -> None:
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        pool = PlainPool.random(**command["pool"])
        geometry = StoreGeometry.of_pool(pool, checksums=command["checksums"])
        store = HostKVStore.join(StoreAddress(**command["address"]), geometry, rank=command["rank"])

        def report(blocks: list[int]) -> None:
            sys.stdout.write(json.dumps({"pid": os.getpid(), "blocks": blocks}) + "\n")
            sys.stdout.flush()

        {"hold": hold, "change": change, "write": write}[command["do"]](store, pool, report)


if __name__ == "__main__":
    main()
