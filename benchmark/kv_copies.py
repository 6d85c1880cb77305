#!/usr/bin/env python
"""Owns the measurement of copies between device pages and the host KV store; asserts nothing.

For every size of a page's part: pages are stored and loaded again, all layers in one ticket, through a store in memory
(of one rank, and shared by ranks) and through one in a file, with each number of workers; beside them, in the same
round, one large memcpy between two buffers, which is what the memory allows one thread. GB/s are 10^9 bytes of KV a
second: each byte is read once and written once. A file is in the page cache unless it is larger than memory; what the
disk does is seen with --sync only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from comparison import machine

from sgl_batch.kv_offload.host_kv_store import HostKVStore
from sgl_batch.kv_offload.native_copy_engine import NativeCopyEngine
from sgl_batch.kv_offload.store_geometry import StoreGeometry

KIB = 1 << 10


@dataclass(frozen=True, slots=True)
class Pages:
    """Make device pages: `parts[layer][part]`, uint8 [num_pages, bytes]."""

    parts: list[tuple[torch.Tensor, ...]]

    @property
    def layer_num(self) -> int:
        return len(self.parts)

    def page_parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self.parts[layer]


def _pages(part_bytes: int, options: argparse.Namespace) -> Pages:
    num_pages = max(2, int(options.total_mib * KIB * KIB) // (part_bytes * options.layers * options.parts))
    return Pages(
        [
            tuple(torch.full((num_pages, part_bytes), layer, dtype=torch.uint8) for _ in range(options.parts))
            for layer in range(options.layers)
        ]
    )


@contextmanager
def _copies(
    kind: str, num_workers: int, pages: Pages, options: argparse.Namespace
) -> Iterator[dict[str, Callable[[], None]]]:
    """Make a store and its timed calls: `store` and `load` of all pages, each as one ticket."""
    geometry = StoreGeometry.of_pool(pages, checksums=options.checksums)
    num_pages = len(pages.parts[0][0])
    with HostKVStore.create(
        geometry,
        num_bytes=num_pages * geometry.block_bytes,
        num_ranks=2 if kind == "shared" else 1,
        directory=options.directory if kind == "file" else None,
    ) as store:
        engine = NativeCopyEngine(store, pages, num_workers=num_workers)
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0))
        writing, ready = store.prepare_store(num_pages), None
        assert writing is not None

        def store_all() -> None:
            nonlocal writing, ready
            if ready is not None:
                store.free(ready)
                writing = store.prepare_store(num_pages)
            engine.store_pages(range(geometry.num_layers), order, writing).wait()
            store.complete_store(writing)
            ready = writing
            if options.sync and kind == "file":
                with open(store.address.data_path, "rb") as file:
                    os.fsync(file.fileno())

        def load_all() -> None:
            engine.load_pages(range(geometry.num_layers), ready, order).wait()

        yield {"store": store_all, "load": load_all}
        engine.close()


def _seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _measure(kind: str, num_workers: int, pages: Pages, options: argparse.Namespace) -> None:
    total = sum(part.nbytes for parts in pages.parts for part in parts)
    source, target = torch.ones(total, dtype=torch.uint8), torch.zeros(total, dtype=torch.uint8)
    rates: dict[str, list[float]] = {}
    with _copies(kind, num_workers, pages, options) as calls:
        timed = {**calls, "memcpy": lambda: target.copy_(source)}
        first = _seconds(calls["store"])  # the first write allocates the memory or the file
        for _ in range(options.rounds):
            for name, call in timed.items():
                rates.setdefault(name, []).append(total / _seconds(call) / 1e9)
    num_pages, part_bytes = pages.parts[0][0].shape
    figures = "  ".join(_spread(rates[name]) for name in ("store", "load", "memcpy"))
    share = [statistics.median(rates[name]) / statistics.median(rates["memcpy"]) for name in ("store", "load")]
    print(
        f"{part_bytes // KIB:>6} {num_pages:>6}  {kind:<7} {num_workers:>7}  {figures}  {share[0]:5.2f} {share[1]:5.2f}"
        f"  {total / first / 1e9:6.2f}",
        flush=True,
    )


def _spread(rates: list[float]) -> str:
    return f"{statistics.median(rates):6.2f} ({min(rates):5.2f}-{max(rates):5.2f})"


def _submission(options: argparse.Namespace) -> None:
    """Measure the caller's time for a ticket, by the number of its pages."""
    pages = _pages(4 * KIB, options)
    geometry = StoreGeometry.of_pool(pages)
    num_pages = len(pages.parts[0][0])
    with HostKVStore.create(geometry, num_bytes=num_pages * geometry.block_bytes) as store:
        engine = NativeCopyEngine(store, pages, num_workers=1)
        for count in sorted({1, 16, min(256, num_pages)}):
            numbers = torch.arange(count)
            times = []
            for _ in range(200):
                blocks = store.prepare_store(count)
                begun = time.perf_counter()
                ticket = engine.store_pages(range(1), numbers, blocks)
                times.append(time.perf_counter() - begun)
                ticket.wait()
                store.free(blocks)
            median_us = statistics.median(times) * 1e6
            print(f"submitting {count:>4} pages: {median_us:7.1f} us, {median_us / count:6.3f} a page", flush=True)
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""examples:
  benchmark/kv_copies.py                                        memory and files, with the default sizes
  benchmark/kv_copies.py --kinds file --directory /var/tmp --sync   what the disk under /var/tmp does
  benchmark/kv_copies.py --part-kib 128 --layers 48 --checksums     a large model's pages, with checksums

read the columns so: `of memcpy` near 1 means that copying costs what the memory costs; store below load for a file is
the page cache taking new pages; `first` is the first store ever, which claims the memory.""",
    )
    parser.add_argument("--part-kib", type=int, nargs="+", default=[4, 64, 256], help="KiB of one part of one layer")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--parts", type=int, default=2, help="2: keys and values, 1: latent attention")
    parser.add_argument(
        "--kinds", nargs="+", default=["memory", "shared", "file"], choices=("memory", "shared", "file")
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="threads that copy")
    parser.add_argument("--total-mib", type=float, default=768.0, help="of all pages together")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="for the file (default: the system's temporary directory)")
    parser.add_argument("--checksums", action="store_true", help="as with --kv-store-checksums")
    parser.add_argument("--sync", action="store_true", help="a store to a file ends when the disk has it")
    options = parser.parse_args()
    options.directory = options.directory or Path(tempfile.gettempdir())
    torch.set_num_threads(1)  # memcpy with one thread
    commit = machine.source(Path(__file__).resolve().parent.parent)
    print(f"{machine.describe(machine.hardware())}, torch {torch.__version__}, {commit}\n{vars(options)}", flush=True)
    print("GB/s: median (lowest-highest)")
    columns = f"{'store':<21} {'load':<21} {'memcpy':<20}  of memcpy     first"
    print(f"   KiB  pages  kind    workers  {columns}", flush=True)
    for part_kib in options.part_kib:
        pages = _pages(part_kib * KIB, options)
        for kind in options.kinds:
            for num_workers in options.workers:
                _measure(kind, num_workers, pages, options)
    _submission(options)


if __name__ == "__main__":
    main()
