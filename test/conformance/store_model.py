"""Owns a model of the host KV store in plain Python, and random operations that compare a real store with it."""

from __future__ import annotations

import random
from collections.abc import Set

import pytest
import torch
from store_cases import NUM_PAGES, PlainPool

from sgl_batch.kv_offload.copy_engine import CopyEngine
from sgl_batch.kv_offload.host_kv_store import HostKVStore
from sgl_batch.kv_offload.store_errors import StoreFault


class ModelledStore:
    """A store of one rank and its engine, and the expected state, references and value of each block."""

    def __init__(self, store: HostKVStore, engine: CopyEngine, pool: PlainPool, seed: int) -> None:
        self.store, self.engine, self.pool = store, engine, pool
        self.random = random.Random(seed)
        self.writing: set[int] = set()
        self.ready: dict[int, tuple[int, int]] = {}  # block -> references, value
        self.layers = range(pool.layer_num)
        self.refusals = 0

    def step(self) -> None:
        """Do a random operation, and check the store after it."""
        operations = (
            (self.prepare, 4),
            (self.store_pages, 4),
            (self.store_again, 1),
            (self.load_pages, 3),
            (self.share, 2),
            (self.free, 6),
            (self.misuse, 2),
        )
        names, weights = zip(*operations, strict=True)
        self.random.choices(names, weights=weights)[0]()
        self.check()

    def some(self, blocks: Set[int] | dict[int, tuple[int, int]]) -> list[int]:
        return self.random.sample(sorted(blocks), min(len(blocks), self.random.randint(1, 5)))

    def prepare(self) -> None:
        count = self.random.randint(0, 6)
        free = self.store.num_blocks - len(self.writing) - len(self.ready)
        blocks = self.store.prepare_store(count)
        if count > free:
            assert blocks is None
            self.refusals += 1
            return
        assert blocks is not None
        taken = blocks.tolist()
        assert len(set(taken)) == count
        assert not (self.writing | self.ready.keys()).intersection(taken)
        self.writing.update(taken)

    def alone(self) -> list[int]:
        """Return the READY blocks with one reference."""
        return [block for block, (references, _) in self.ready.items() if references == 1]

    def store_pages(self) -> None:
        self.write(self.some(self.writing), new=True)

    def store_again(self) -> None:
        self.write(self.some(set(self.alone())), new=False)

    def write(self, blocks: list[int], *, new: bool) -> None:
        pages = self.random.sample(range(NUM_PAGES), len(blocks))
        values = [self.random.randrange(256) for _ in blocks]
        for page, value in zip(pages, values, strict=True):
            self.pool.fill(page, value)
        self.engine.store_pages(self.layers, pages, blocks).wait()
        if new:
            self.store.complete_store(blocks)
        self.writing.difference_update(blocks)
        self.ready.update({block: (1, value) for block, value in zip(blocks, values, strict=True)})

    def load_pages(self) -> None:
        blocks = self.some(self.ready)
        blocks += blocks[:1]  # one block to two pages
        pages = self.random.sample(range(NUM_PAGES), len(blocks))
        self.engine.load_pages(self.layers, blocks, pages).wait()
        assert [self.pool.value(page) for page in pages] == [self.ready[block][1] for block in blocks]

    def share(self) -> None:
        blocks = self.some(self.ready)
        self.store.share(blocks)
        self.ready.update({block: (self.ready[block][0] + 1, self.ready[block][1]) for block in blocks})

    def free(self) -> None:
        blocks = self.some(self.writing | self.ready.keys())
        self.store.free(blocks)
        for block in blocks:
            self.writing.discard(block)
            references, value = self.ready.pop(block, (0, 0))
            if references > 1:
                self.ready[block] = references - 1, value

    def misuse(self) -> None:
        """Misuse one block of a batch, which must be refused as a whole; `check` then sees that nothing has changed."""
        free = set(range(self.store.num_blocks)) - self.writing - self.ready.keys()
        alone = self.alone()
        single_reference = alone + sorted(self.writing)
        shared = self.ready.keys() - set(alone)
        attempts = [
            (self.store.free, self.some(self.writing), self.some(free)),
            (self.store.free, single_reference[:1], single_reference[:1]),
            (self.store.share, self.some(self.ready), self.some(self.writing)),
            (self.store.complete_store, self.some(self.writing), self.some(self.ready)),
            (self.store.complete_store, sorted(self.writing)[:1], sorted(self.writing)[:1]),
            (self.store_to, self.some(self.writing), self.some(shared)),
            (self.store_to, sorted(self.writing)[:1], sorted(self.writing)[:1]),
            (self.load_from, self.some(self.ready), self.some(self.writing)),
        ]
        call, legal, forbidden = self.random.choice(attempts)
        if not forbidden:
            return
        with pytest.raises(StoreFault, match="slot"):
            call(legal + forbidden)
        self.refusals += 1

    def store_to(self, blocks: list[int]) -> None:
        self.engine.store_pages(self.layers, range(len(blocks)), blocks)

    def load_from(self, blocks: list[int]) -> None:
        self.engine.load_pages(self.layers, blocks, range(len(blocks)))

    def check(self) -> None:
        counts = self.store.counts()
        assert (counts.writing, counts.ready) == (len(self.writing), len(self.ready))
        assert counts.free + counts.used == self.store.num_blocks
        references = torch.zeros(self.store.num_blocks, dtype=torch.int64)
        references[sorted(self.writing)] = 1
        references[sorted(self.ready)] = torch.tensor(
            [self.ready[block][0] for block in sorted(self.ready)], dtype=torch.int64
        )
        assert torch.equal(self.store.references(range(self.store.num_blocks)), references)
        self.store.audit()
