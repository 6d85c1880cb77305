"""A process that runs the passes of real models in sets of ranks that share them, and compares with unshared passes.

Arguments: a directory, and works as JSON: a list of objects with the fields of `Work`. It prints a JSON object for each
rank of each work.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from loaded_models import PAGE, decode_batch, extend_batch, forward_parts, kv_indices_of, load

from sgl_batch.core.topology import Topology
from sgl_batch.distributed.rank_context import RankContext
from sgl_batch.model_executor import expert_exchange
from sgl_batch.model_executor.partition_set import PartitionSets

# Tokens of each sequence before and after the second prefill; each begins at a page of its own.
FIRST, SECOND = (20, 7, 33), (41, 3, 1)
ROWS = range(len(FIRST))
PAGES_EACH = 8
# The rows of each decode pass. The last ones of as many rows run from a record, where passes have one.
DECODED = [[*ROWS]] * 3 + [[0]] * 3
# The first prefill has 60 rows, the second 45.
SUMMED_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A model, its number type and flags of sgl_batch; and the sets that the engine's ranks form.

    `least_bytes`: what a product or attention must read to be split. `by_hand`: ranks that run no pass from a record.
    """

    model: str
    dtype: str
    flags: dict[str, Any]
    sets: list[list[int]]
    least_bytes: int = 0
    by_hand: list[int] = field(default_factory=list)


class Scene:
    """Sequences of a model, and the passes that compute them."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.pool = runner, runner.token_to_kv_pool
        draw = torch.Generator().manual_seed(7)
        self.ids = [
            torch.randint(runner.model.config.vocab_size, (first + second + len(DECODED),), generator=draw).tolist()
            for first, second in zip(FIRST, SECOND, strict=True)
        ]
        table = runner.req_to_token_pool.req_to_token
        for row in ROWS:
            kv_indices = kv_indices_of(range(1 + row * PAGES_EACH, 1 + (row + 1) * PAGES_EACH))
            table[row, : len(kv_indices)] = kv_indices.to(table.dtype)

    def run(self) -> dict[str, torch.Tensor]:
        """Compute all sequences from empty pages; return the logits of each pass, and the KV of each sequence."""
        for part in self.pool.all_parts:
            part.fill_(0.5)
        ends = [first + second for first, second in zip(FIRST, SECOND, strict=True)]
        starts = [0] * len(FIRST)
        found = {
            "prefill": self._pass(extend_batch(self.runner, ROWS, starts, self._tokens(starts, FIRST))),
            "prefill behind prefixes": self._pass(extend_batch(self.runner, ROWS, FIRST, self._tokens(FIRST, ends))),
        }
        for number, rows in enumerate(DECODED):
            now = [ends[row] + number for row in rows]
            batch = decode_batch(self.runner, rows, now, self._nexts(rows, now))
            found[f"decode {number} of {len(rows)}"] = self._pass(batch)
        for row, end in zip(ROWS, ends, strict=True):
            first = (1 + row * PAGES_EACH) * PAGE
            for layer in range(self.pool.layer_num):
                parts = self.pool.read_kv(layer, torch.arange(first, first + end + 1))
                found[f"kv of sequence {row} in layer {layer}"] = torch.cat([part.flatten() for part in parts])
        return found

    def _tokens(self, begins: Any, ends: Any) -> list[list[int]]:
        return [self.ids[row][begin:end] for row, begin, end in zip(ROWS, begins, ends, strict=True)]

    def _nexts(self, rows: Any, ends: Any) -> list[int]:
        return [self.ids[row][end] for row, end in zip(rows, ends, strict=True)]

    def _pass(self, batch: Any) -> torch.Tensor:
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

        batch.capture_hidden_mode = CaptureHiddenMode.NULL
        logits: torch.Tensor = forward_parts(self.runner, [batch])[0].next_token_logits
        return logits.clone()


@torch.no_grad()
def run_rank(work: Work, rank: int, directory: Path) -> None:
    """Run the passes as one rank, first unshared and then in its set, and print what differs."""
    torch.set_num_threads(1)
    expert_exchange.SUMMED_ROWS = SUMMED_ROWS
    num_ranks = sum(map(len, work.sets))
    rank_context = RankContext(rank=rank, topology=Topology.uniform(num_ranks), directory=directory)
    runner = load(work.model, work.dtype, directory, rank_context=rank_context, **work.flags)
    if rank in work.by_hand:
        runner.layer_runner._recorded = None
    scene = Scene(runner)
    counts = runner.layer_runner.counters.counts
    expected = scene.run()
    unshared, recorded = counts["column_gathers"], 0
    sets = PartitionSets(
        rank_context,
        runner.layer_runner.counters,
        device="cpu",
        through_memory=work.flags.get("token_dispatcher", "auto") != "gloo",
        least_bytes=work.least_bytes,
    )
    (own,) = [each for each in work.sets if rank in each]
    results = []
    for _ in range(2):
        runner.layer_runner.partition, before = sets.of(own), counts["recorded_passes"]
        results.append(scene.run())
        recorded += counts["recorded_passes"] - before
        runner.layer_runner.partition = None
        results.append(scene.run())
    wrong = sorted({name for found in results for name in expected if not same(found[name], expected[name])})
    told = {
        **asdict(work),
        "rank": rank,
        "wrong": wrong,
        "compared": len(expected),
        "gathers": counts["column_gathers"],
        "unshared_gathers": unshared,
        "recorded": recorded,
        "finite": all(bool(one.isfinite().all()) for one in expected.values()),
    }
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found, expected)


def main() -> None:
    """Run each work in processes of its own, one for each rank."""
    directory, works = sys.argv[1:]
    # Import all of SGLang's models once, instead of in each of the processes below.
    importlib.import_module("sglang.srt.models.registry")
    fork = multiprocessing.get_context("fork")
    for number, fields in enumerate(json.loads(works)):
        work, own = Work(**fields), Path(directory, str(number))
        own.mkdir()
        ranks = range(sum(map(len, work.sets)))
        children = [fork.Process(target=run_rank, args=(work, rank, own)) for rank in ranks]
        for child in children:
            child.start()
        for child in children:
            child.join()
        assert all(child.exitcode == 0 for child in children), f"{work} ended with {[c.exitcode for c in children]}"


if __name__ == "__main__":
    main()
