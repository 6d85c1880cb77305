#!/usr/bin/env python
"""Owns the measurement of products that ranks of one machine share by columns; asserts nothing.

Each rank is a process bound to a core of its own. For each size of a weight and number of rows, alternating round by
round: a product that every rank computes whole, and one that the ranks share. It shows from which size on sharing pays
(layers/column_split.py). Weights are taken in turns, so that caches do not hold them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from comparison import machine

from sgl_batch.core.partition_memory import COLUMN_GATHER_BYTES
from sgl_batch.distributed.shared_memory import shared_regions
from sgl_batch.distributed.shared_memory_column_gather import SharedMemoryColumnGather
from sgl_batch.kernel_loader import native_kernels
from sgl_batch.layers.column_split import ColumnSplit
from sgl_batch.layers.packed_weights import PackedWeights
from sgl_batch.metrics.counters import Counters

WARMUP_ROUNDS = 5
_ALL_WEIGHTS_BYTES = 256 << 20
_TIMEOUT_S = 60.0


def _weights(packed: PackedWeights, weight_bytes: int, inputs: int) -> itertools.cycle[torch.Tensor]:
    shape = (weight_bytes // 2 // inputs, inputs)
    found = [torch.ones(shape, dtype=torch.bfloat16) for _ in range(_ALL_WEIGHTS_BYTES // weight_bytes)]
    for weight in found:
        packed.add_linear(weight)
    return itertools.cycle(found)


def _measure(rank: int, rendezvous: str, options: argparse.Namespace) -> None:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=options.ranks)
    kernels, group = native_kernels(), dist.group.WORLD
    assert kernels is not None, "scripts/install builds the native kernels"
    assert group is not None, "made above"
    regions = shared_regions(group, COLUMN_GATHER_BYTES)
    gather = SharedMemoryColumnGather(regions, rank, kernels, timeout_s=_TIMEOUT_S)
    split = ColumnSplit(gather, Counters(), least_bytes=0)
    for kib, rows in itertools.product(options.kib, options.rows):
        packed = PackedWeights(kernels)
        weights = _weights(packed, kib << 10, options.inputs)
        x = torch.ones(rows, options.inputs, dtype=torch.bfloat16)
        times_us: dict[str, list[float]] = {"whole": [], "shared": []}
        for number in range(WARMUP_ROUNDS + options.rounds):
            for name, current in (("whole", None), ("shared", split)):
                packed.split.current = current
                gather.gather(x[:, :1], [1] * options.ranks)  # a barrier
                begun = time.perf_counter()
                packed.linear(x, next(weights))
                if number >= WARMUP_ROUNDS:
                    times_us[name].append((time.perf_counter() - begun) * 1e6)
        told = "  ".join(f"{name} {_quartiles(times)}" for name, times in times_us.items())
        if rank == 0:
            print(f"{kib:>6} KiB {rows:>3} rows  {told}", flush=True)
    dist.destroy_process_group()


def _quartiles(times: list[float]) -> str:
    low, median, high = statistics.quantiles(times, n=4)
    return f"{median:8.1f} us (quartiles {low:.1f}-{high:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kib", type=int, nargs="+", default=[64, 128, 256, 512, 1024, 2048, 4096, 16384])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 32])
    parser.add_argument("--inputs", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    commit = machine.source(Path(__file__).resolve().parent.parent)
    print(f"{machine.describe(machine.hardware())}, torch {torch.__version__}, {commit}\n{vars(options)}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        mp.spawn(_measure, args=(str(Path(scratch) / "rendezvous"), options), nprocs=options.ranks)


if __name__ == "__main__":
    main()
