#!/usr/bin/env python
"""Measures the simulator: its own time and memory for a large cluster, with every rank and every sequence of its own.

Lengths of the sequences of each rank are drawn from a trace. Decisions are those of the engine (core/), costs those
that are modelled for the cluster. With --alike N each N ranks have the same lengths, and with --collapse one of them is
simulated and stands for all N.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from comparison.terminal import exit_code, say
from comparison.trace_lengths import trace_lengths

from sgl_batch.core.plan import PhasePlan, Plan
from sgl_batch.errors import ConfigError
from sgl_batch.planner.candidate import DEVICE
from sgl_batch.planner.layouts import Layout
from sgl_batch.simulator.cluster.deployment import Deployment, deployment
from sgl_batch.simulator.collapsed import Collapsed
from sgl_batch.simulator.instance import Instance
from sgl_batch.simulator.kv_forms import RankPages, make_form
from sgl_batch.simulator.rank import SimulatedRank
from sgl_batch.simulator.requests import Requests
from sgl_batch.simulator.scheduler import Ours

_PAGE = 64
_SLOTS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a cluster, how many of its ranks have the same lengths, and whether one of these stands for all."""

    ranks: int
    instances: int
    sequences: int
    rows: int
    alike: int
    collapse: bool

    def __post_init__(self) -> None:
        if self.ranks % (self.instances * self.alike):
            raise ConfigError(
                f"--ranks is {self.ranks}; it must be a multiple of --instances ({self.instances}) times --alike "
                f"({self.alike})"
            )
        if self.sequences % self.ranks and self.alike > 1:
            raise ConfigError(f"--sequences is {self.sequences}; with --alike it must be a multiple of {self.ranks}")

    @property
    def stands_for(self) -> int:
        """Return for how many ranks a simulated rank stands."""
        return self.alike if self.collapse else 1

    @property
    def simulated_ranks(self) -> int:
        """Return the simulated ranks of all instances."""
        return self.ranks // self.stands_for


def drawn_requests(trace: Path, size: Size, seed: int) -> Requests:
    """Return the simulated sequences, with lengths of a trace, drawn with repetition for each rank that is not alike.

    They are for the ranks by turns. Each may generate as many as the longest of the trace.
    """
    lengths = np.maximum(np.array(trace_lengths(trace), dtype=np.int64), 1)
    of_rank, count = -(-size.sequences // size.ranks), size.sequences // size.stands_for
    drawn = np.random.default_rng(seed).integers(0, len(lengths), (of_rank, size.ranks // size.alike))
    found = lengths[np.repeat(drawn, size.alike // size.stands_for, axis=1).reshape(-1)[:count]]
    return Requests(prompts=found[:, 0], outputs=found[:, 1], most=np.full(count, lengths[:, 1].max()))


def instance_of(deployed: Deployment, size: Size, requests: Requests, number: int) -> Instance:
    """Return one instance, with the sequences of its ranks."""
    chunk = deployed.engine.chunk_tokens
    plan = Plan(
        prefill=PhasePlan(b_attn=chunk, b_moe=chunk),
        decode=PhasePlan(b_attn=size.rows, b_moe=size.rows),
        page_size=_PAGE,
        boundary_tokens=_PAGE,
        refill_watermark=0.75,
        ready_target=size.rows * 3 // 2,
    )
    memory = RankPages(device=deployed.device_tokens // _PAGE)
    every, dealt = size.simulated_ranks, range(len(requests))
    count = every // size.instances
    ranks = [
        SimulatedRank(requests, dealt[rank::every], plan, make_form(DEVICE, memory, _PAGE), request_slots=_SLOTS)
        for rank in range(number * count, (number + 1) * count)
    ]
    costs = Collapsed(deployed.costs, size.stands_for) if size.collapse else deployed.costs
    return Instance(ranks, plan, Ours(ranks[0].form.policy), costs)


def simulate(args: argparse.Namespace, size: Size) -> str:
    """Simulate all instances one after the other; return what they took, as text."""
    layout = Layout(instances=size.instances, ranks=size.ranks // size.instances)
    deployed = deployment(args.model, f"{args.gpu}x{size.ranks}", "batchgen", layout)
    requests = drawn_requests(args.trace, size, args.seed)
    seconds, idle, finished, refused, moved = 0.0, 0.0, 0, 0, 0
    for number in range(size.instances):
        instance = instance_of(deployed, size, requests, number)
        account = instance.run()
        tallies = [rank.tally for rank in instance.ranks]
        finished += sum(one.finished for one in tallies)
        refused += sum(one.refused for one in tallies)
        moved += sum(one.moved_tokens for one in tallies)
        seconds, idle = max(seconds, account.seconds), idle + account.idle
        say(f"instance {number + 1} of {size.instances}: {account.seconds:.1f} s, {account.steps} decode steps")
    if finished + refused != len(requests):
        raise AssertionError(f"{finished} sequences have ended and {refused} were refused, of {len(requests)}")
    whole = size.stands_for
    return (
        f"{deployed.text()}\n"
        f"modelled: {seconds:.2f} s for {size.sequences:,} sequences on {size.ranks:,} ranks, of which "
        f"{refused * whole:,} sequences can never fit; ranks wait {idle / size.instances / seconds:.0%} of the time; "
        f"KV of {moved * whole:,} tokens changes its rank"
    )


def main(argv: Sequence[str]) -> int:
    """Simulate; print what is modelled, and the time and memory of this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="the Azure trace of LLM inference")
    parser.add_argument("--ranks", type=int, default=1024, help="(1024)")
    parser.add_argument("--instances", type=int, default=16, help="groups of ranks that share nothing (16)")
    parser.add_argument("--sequences", type=int, default=1_000_000, help="(1,000,000)")
    parser.add_argument("--rows", type=int, default=256, help="the most sequences that a rank decodes at once (256)")
    parser.add_argument("--alike", type=int, default=1, metavar="N", help="let each N ranks have the same lengths (1)")
    parser.add_argument("--collapse", action="store_true", help="simulate one of --alike ranks, for speed")
    parser.add_argument("--model", default="deepseek-r1", help="(deepseek-r1)")
    parser.add_argument("--gpu", default="h200", help="(h200)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw of lengths (0)")
    args = parser.parse_args(argv)
    counts = {name: getattr(args, name) for name in ("ranks", "instances", "sequences", "rows", "alike")}
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"--{name} is {count}; it must be at least 1")
    size = Size(**counts, collapse=args.collapse)
    begun = time.perf_counter()
    print(simulate(args, size))
    wall, processor = time.perf_counter() - begun, time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"this process: {wall:.1f} s, {processor:.1f} s of processor time with imports, {peak:.2f} GiB at most")
    if size.collapse:
        print(
            f"collapsed: {size.simulated_ranks:,} ranks were simulated; each stands for {size.alike}, which have "
            "sequences of the same lengths"
        )
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("large_cluster.py", lambda: main(sys.argv[1:])))
