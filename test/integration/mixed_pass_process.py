"""A process that runs decode rows and prompts in one pass over real models and compares it with two passes.

Arguments: a directory, and the models' paths. It prints a JSON object for each pass that it compares.
"""

from __future__ import annotations

import importlib
import itertools
import json
import multiprocessing
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from host_sync_pass import run_counted
from loaded_models import PAGE, PAGES, decode_batch, extend_batch, forward_parts, kv_indices_of, load
from yield_callbacks import ROUNDED_LAYER, round_trip

from sgl_batch.core.decode_streaming import StreamedRow, lay_out
from sgl_batch.core.units import PassShape, Unit, admissible, static_order
from sgl_batch.errors import ConfigError
from sgl_batch.kv_offload.decode_staging import DecodeStaging, PartCopies
from sgl_batch.kv_offload.host_kv_store import HostKVStore
from sgl_batch.kv_offload.native_copy_engine import NativeCopyEngines
from sgl_batch.kv_offload.prefill_staging import PrefillStaging
from sgl_batch.kv_offload.store_geometry import StoreGeometry
from sgl_batch.mem_cache.latent_page_pool import LatentPagePool

# Lengths of the sequences that decode: one opens a page. Of prompts: tokens computed before, and new ones.
LENGTHS = (20, 7, 16, 33, 1)
PREFIXES, NEWS = (16, 0), (21, 5)
DECODE, PROMPTS = tuple(range(5)), (5, 6)
FIRST_OF_PROMPTS, FIRST_STAGED = 400, PAGES + 1


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)


class Scene:
    """Sequences of a model whose KV is in the pool's own pages, and the results of each batch in a pass of its own."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.pool = runner, runner.token_to_kv_pool
        self.layers = range(self.pool.layer_num)
        self.table = runner.req_to_token_pool.req_to_token
        runner.model.logits_processor.forward = lambda ids, hidden, head, batch: hidden.clone()
        draw = torch.Generator().manual_seed(5)
        total = sum(LENGTHS) + len(LENGTHS) + sum(PREFIXES) + sum(NEWS)
        self.ids = iter(torch.randint(runner.model.config.vocab_size, (total,), generator=draw).tolist())
        self.ends = [*(length + 1 for length in LENGTHS), *(p + n for p, n in zip(PREFIXES, NEWS, strict=True))]
        counts = [pages_for(end) for end in self.ends]
        starts = [*itertools.accumulate(counts[:4], initial=1)]
        firsts = [*starts, FIRST_OF_PROMPTS, FIRST_OF_PROMPTS + counts[5]]
        self.pages = [list(range(first, first + count)) for first, count in zip(firsts, counts, strict=True)]
        for row, pages in enumerate(self.pages):
            self.map_pages(row, pages)
        rows, lengths = [*DECODE, PROMPTS[0]], [*LENGTHS, PREFIXES[0]]
        forward_parts(runner, [extend_batch(runner, rows, [0] * len(rows), [self.draw(n) for n in lengths])])
        self.before = [part.clone() for part in self.pool.all_parts]
        self.tokens, self.prompts = self.draw(len(LENGTHS)), [self.draw(n) for n in NEWS]
        (decoded,), (prefilled,) = (forward_parts(runner, [batch]) for batch in self.batches())
        self.expected = decoded, prefilled
        self.expected_kv = [self.kv(row) for row in range(len(self.pages))]

    def draw(self, count: int) -> list[int]:
        return list(itertools.islice(self.ids, count))

    def map_pages(self, row: int, pages: list[int]) -> None:
        kv_indices = kv_indices_of(pages)
        self.table[row, : len(kv_indices)] = kv_indices.to(self.table.dtype)

    def batches(self) -> list[Any]:
        return [
            decode_batch(self.runner, DECODE, LENGTHS, self.tokens),
            extend_batch(self.runner, PROMPTS, PREFIXES, self.prompts),
        ]

    def kv(self, row: int) -> list[torch.Tensor]:
        kv_indices = kv_indices_of(self.pages[row])[: self.ends[row]]
        return [part for layer in self.layers for part in self.pool.read_kv(layer, kv_indices)]

    def reset(self) -> None:
        for part, before in zip(self.pool.all_parts, self.before, strict=True):
            part.copy_(before)
        for row, pages in enumerate(self.pages):
            self.map_pages(row, pages)

    def set_sub_batches(self, b_attn: int, accumulate: bool) -> None:
        sizes = {"b_attn_prefill": b_attn, "b_attn_decode": b_attn, "b_moe_decode": 64, "b_moe_prefill": 64}
        in_force = self.runner.context.in_force
        in_force.apply(in_force.prepare({**sizes, "mix_prefill": 64 if accumulate else 0, "accumulate": accumulate}))

    def same_kv(self) -> bool:
        return all(
            torch.equal(found, expected)
            for row, parts in enumerate(self.expected_kv)
            for found, expected in zip(self.kv(row), parts, strict=True)
        )


class Stored:
    """A store and the stagings through which a scene's KV is copied to it and from it."""

    def __init__(self, scene: Scene, store: HostKVStore, b_attn: int) -> None:
        self._scene, self._store, self._b_attn = scene, store, b_attn
        self._engines = NativeCopyEngines(store, num_workers=1)
        self._engine = self._engines.engine_for(scene.pool)
        self._sink = PrefillStaging(store, scene.pool, self._engines, first_page=FIRST_STAGED)
        self._source = DecodeStaging(scene.pool, self._engines, first_page=FIRST_STAGED)
        self._blocks: dict[int, torch.Tensor] = {}

    def _to_store(self, row: int, tokens: int) -> torch.Tensor:
        """Return blocks for all pages of a row, of which those of its first `tokens` are stored and READY."""
        pages, num_stored = self._scene.pages[row], pages_for(tokens)
        blocks = self._blocks[row] = self._store.prepare_store(len(pages))
        self._engine.store_pages(self._scene.layers, pages[:num_stored], blocks[:num_stored]).wait()
        self._store.complete_store(blocks[:num_stored])
        return blocks

    def begin_sink(self) -> None:
        restored = self._to_store(PROMPTS[0], PREFIXES[0])[: pages_for(PREFIXES[0])]
        self._store.free(self._blocks[PROMPTS[0]][len(restored) :])
        counts = [pages_for(length) for length in NEWS]
        new = self._store.prepare_store(sum(counts))
        self._blocks[PROMPTS[0]] = torch.cat((restored, new[: counts[0]]))
        self._blocks[PROMPTS[1]] = new[counts[0] :]
        self._scene.map_pages(PROMPTS[0], list(range(FIRST_STAGED, FIRST_STAGED + 1 + counts[0])))
        self._scene.map_pages(PROMPTS[1], [FIRST_STAGED + 1 + counts[0]])
        self._sink.begin(NEWS, new, restored=restored)
        self._scene.runner.layer_runner.prefill_sink = self._sink

    def begin_source(self) -> None:
        stored = [self._to_store(row, LENGTHS[row]).tolist() for row in DECODE]
        rows = [
            StreamedRow(store_blocks=tuple(blocks[: LENGTHS[row] // PAGE]), own_pages=1)
            for row, blocks in enumerate(stored)
        ]
        parts = lay_out(rows, half_pages=self._source.half_pages, most_rows=self._b_attn)
        copies = []
        for part in parts:
            part_rows = range(part.start, part.end)
            pages = dict(zip(part_rows, part.pages, strict=True))
            load = [
                pair
                for row in part_rows
                for pair in [*zip(stored[row], pages[row], strict=True)][: pages_for(LENGTHS[row])]
            ]
            for row in part_rows:
                self._scene.map_pages(row, [FIRST_STAGED + page for page in pages[row]])
            copies.append(
                PartCopies(
                    span=(part.start, part.end),
                    part=part,
                    load_blocks=torch.tensor([block for block, _ in load]),
                    load_pages=torch.tensor([page for _, page in load]),
                    store_pages=torch.tensor([pages[row][-1] for row in part_rows]),
                    store_blocks=torch.tensor([stored[row][-1] for row in part_rows]),
                )
            )
        self._source.begin(copies)
        self._scene.runner.layer_runner.decode_source = self._source

    def end(self) -> None:
        """Load all KV of the store back to the pool's own pages, and close the stagings."""
        runner = self._scene.runner.layer_runner
        if runner.prefill_sink is not None:
            self._sink.end()
        if runner.decode_source is not None:
            self._source.end()
            self._store.complete_store([self._blocks[2][-1]])
        runner.prefill_sink = runner.decode_source = None
        for row, blocks in self._blocks.items():
            self._engine.load_pages(self._scene.layers, blocks, self._scene.pages[row]).wait()
        for used in (self._sink, self._source, self._engine, self._engines):
            used.close()


def in_any_order(shape: PassShape) -> Iterator[Unit]:
    """Yield admissible units in a random order."""
    draw, done = random.Random(7), set[Unit]()
    while units := admissible(shape, done):
        unit = draw.choice(units)
        done.add(unit)
        yield unit


def compare(
    scene: Scene, *, sink: bool, source: bool, b_attn: int, accumulate: bool = True, any_order: bool = False
) -> dict[str, Any]:
    """Run one pass over both batches and compare it with the two passes."""
    scene.reset()
    scene.set_sub_batches(b_attn, accumulate)
    scene.runner.layer_runner.order = in_any_order if any_order else static_order
    with HostKVStore.create(StoreGeometry.of_pool(scene.pool), num_bytes=8 << 20) as store:
        stored = Stored(scene, store, b_attn)
        if sink:
            stored.begin_sink()
        if source:
            stored.begin_source()
        counts = scene.runner.layer_runner.counters.counts
        calls = counts["expert_calls"]
        found = forward_parts(scene.runner, scene.batches())
        calls = counts["expert_calls"] - calls
        stored.end()
    return {
        "sink": sink,
        "source": source,
        "b_attn": b_attn,
        "accumulate": accumulate,
        "any_order": any_order,
        "same_decode": torch.equal(found[0], scene.expected[0]),
        "same_prompts": torch.equal(found[1], scene.expected[1]),
        "same_kv": scene.same_kv(),
        "expert_calls": calls,
    }


@torch.no_grad()
def run(directory: Path, model: str, dtype: str) -> None:
    """Compare all forms of a pass over a model."""
    scene = Scene(load(model, dtype, directory))
    staged = [
        {"sink": sink, "source": source, "b_attn": b_attn}
        for sink, source, b_attn in itertools.product([False, True], [False, True], [3, 64])
    ]
    free = [
        {"sink": False, "source": False, "b_attn": 3, "accumulate": accumulate, "any_order": True}
        for accumulate in (True, False)
    ]
    for form in (*staged, *free):
        found = compare(scene, **form)
        sys.stdout.write(json.dumps({"model": Path(model).name, "dtype": dtype, **found}) + "\n")
        sys.stdout.flush()


@torch.no_grad()
def run_callback(directory: Path, model: str, callback: str) -> None:
    """Run one pass with a callback at yield points, then a decode step without it."""
    (directory / "plain").mkdir()
    runner = load(model, "float32", directory / "plain", on_yield=f"yield_callbacks:{callback}")
    callbacks = runner.layer_runner.on_yield
    runner.layer_runner.on_yield = None
    scene = Scene(runner)
    following = decode_batch(runner, DECODE, [length + 1 for length in LENGTHS], scene.tokens)
    after = forward_parts(runner, [following])[0]
    scene.reset()
    scene.set_sub_batches(64, True)
    runner.layer_runner.on_yield = callbacks
    found = forward_parts(runner, scene.batches())
    runner.layer_runner.on_yield = None
    kv = [scene.kv(row) for row in range(len(scene.pages))]
    same = all(
        torch.equal(found_kv, expected)
        for row, parts in enumerate(scene.expected_kv)
        for index, (found_kv, expected) in enumerate(zip(kv[row], parts, strict=True))
        if index // 2 != ROUNDED_LAYER
    )
    rounded = True
    for row, parts in enumerate(scene.expected_kv):
        keys, values = (round_trip(part) for part in parts[2 * ROUNDED_LAYER :][:2])
        if isinstance(scene.pool, LatentPagePool):
            values = keys[..., : values.shape[-1]]
        rounded &= all(map(torch.equal, kv[row][2 * ROUNDED_LAYER :][:2], (keys, values)))
    comparison = {
        "model": Path(model).name,
        "callback": callback,
        "same_pass": torch.equal(found[0], scene.expected[0]) and torch.equal(found[1], scene.expected[1]),
        "same_kv": scene.same_kv(),
        "other_layers_same": same,
        "layer_rounded": rounded,
        "same_next_step": torch.equal(forward_parts(runner, [following])[0], after),
    }
    sys.stdout.write(json.dumps(comparison) + "\n")
    sys.stdout.flush()


def run_refused(directory: Path, model: str, flags: dict[str, Any]) -> None:
    """Print why a model does not load with these flags."""
    try:
        load(model, "float32", directory, **flags)
    except ConfigError as error:
        sys.stdout.write(json.dumps({"refused": str(error)}) + "\n")
        sys.stdout.flush()


def main() -> None:
    """Run each work in a process of its own, one after the other."""
    directory, *models = sys.argv[1:]
    works: list[tuple[Any, ...]] = [(run, model, "float32") for model in models]
    works.append((run, models[0], "bfloat16"))
    works += [(run_callback, model, "round_kv") for model in (models[0], models[-1])]
    works.append((run_callback, models[0], "leave_as_it_is"))
    works.append((run_counted, models[0]))
    works.append((run_refused, models[0], {"on_yield": "yield_callbacks:round_kv", "kv_store_bytes": 1 << 20}))
    # Import all of SGLang's models once, instead of in each of the processes below.
    importlib.import_module("sglang.srt.models.registry")
    fork = multiprocessing.get_context("fork")
    for number, (work, *given) in enumerate(works):
        own = Path(directory, str(number))
        own.mkdir()
        child = fork.Process(target=work, args=(own, *given))
        child.start()
        child.join()
        assert child.exitcode == 0, f"{work.__name__}{given} ended with {child.exitcode}"


if __name__ == "__main__":
    main()
