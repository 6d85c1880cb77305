#!/usr/bin/env python
"""Owns the measurement of one exchange of tokens between processes of one machine; asserts nothing.

Per number of tokens, each rank's, all timed by rank 0 behind a barrier, alternating round by round: dispatch and
combine through shared memory and over gloo, and the same payload through each way that torch.distributed has on gloo.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from comparison import machine

from sgl_batch.layers.moe.token_dispatcher import create_token_dispatcher
from sgl_batch.layers.moe.token_dispatcher.packed_rows import RowFormat

WARMUP_ROUNDS = 5


def _send_and_receive(received: torch.Tensor, sent: torch.Tensor, num_rows: int) -> None:
    """Exchange as `all_to_all_single`, by a send to and a receive from each other rank."""
    rank = dist.get_rank()
    parts, targets = sent.split(num_rows), received.split(num_rows)
    targets[rank].copy_(parts[rank])
    others = [peer for peer in range(dist.get_world_size()) if peer != rank]
    operations = [dist.P2POp(dist.irecv, targets[peer], peer) for peer in others]
    operations += [dist.P2POp(dist.isend, parts[peer], peer) for peer in others]
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()


def _steps(num_tokens: int, options: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """Return the timed steps, in their order in each round."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x_TM = torch.randn(num_tokens, options.hidden_size, generator=generator).to(torch.bfloat16)
    scores_TE = torch.rand(num_tokens, options.num_experts, generator=generator)
    ids_TK = scores_TE.argsort(1)[:, : options.top_k].to(torch.int32)
    weights_TK = torch.rand(num_tokens, options.top_k, generator=generator)
    row_bytes = RowFormat(hidden_size=options.hidden_size, top_k=options.top_k, dtype=torch.bfloat16).row_bytes
    sent = torch.zeros(num_tokens * dist.get_world_size(), row_bytes, dtype=torch.uint8)
    arrived = torch.zeros_like(sent)

    return {
        **_exchange("shared", options, x_TM, ids_TK, weights_TK),
        **_exchange("gloo", options, x_TM, ids_TK, weights_TK),
        "payload by all_to_all_single": lambda: dist.all_to_all_single(arrived, sent),
        "payload by isend and irecv": lambda: _send_and_receive(arrived, sent, num_tokens),
    }


def _exchange(
    name: str, options: argparse.Namespace, x_TM: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """Run a dispatch and its combine through the dispatcher `name`."""
    dispatcher = create_token_dispatcher(
        name, dist.group.WORLD, num_experts=options.num_experts, hidden_size=options.hidden_size
    )
    received = dispatcher.dispatch(x_TM, ids_TK, weights_TK)
    partial_RM = received.x_RM.to(torch.float32)
    dispatcher.combine(partial_RM, received)

    def dispatch() -> None:
        nonlocal received
        received = dispatcher.dispatch(x_TM, ids_TK, weights_TK)

    return {f"dispatch, {name}": dispatch, f"combine, {name}": lambda: dispatcher.combine(partial_RM, received)}


def _measure(rank: int, rendezvous: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=options.ranks)
    for num_tokens in options.tokens:
        times_ms: dict[str, list[float]] = {}
        steps = _steps(num_tokens, options)
        for number in range(WARMUP_ROUNDS + options.rounds):
            for name, step in steps.items():
                dist.barrier()
                begun = time.perf_counter()
                step()
                if number >= WARMUP_ROUNDS:
                    times_ms.setdefault(name, []).append((time.perf_counter() - begun) * 1e3)
        for name, times in times_ms.items() if rank == 0 else ():
            low, median, high = statistics.quantiles(times, n=4)
            print(f"{num_tokens:>6} tokens  {name:<29} {median:8.3f} ms  (quartiles {low:.3f}-{high:.3f})", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 4096], help="tokens of each rank")
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--num-experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    commit = machine.source(Path(__file__).resolve().parent.parent)
    print(f"{machine.describe(machine.hardware())}, torch {torch.__version__}, {commit}\n{vars(options)}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        mp.spawn(_measure, args=(str(Path(scratch) / "rendezvous"), options), nprocs=options.ranks)


if __name__ == "__main__":
    main()
