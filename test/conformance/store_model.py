"""Owns what a host KV store has to do, in plain Python, and random operations that compare a real one with it."""

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
    """A store of one rank and its engine, beside what each slot must be: references, whether READY, and its value."""

    def __init__(self, store: HostKVStore, engine: CopyEngine, pool: PlainPool, seed: int) -> None:
        self.store, self.engine, self.pool = store, engine, pool
        self.random = random.Random(seed)
        self.writing: set[int] = set()
        self.ready: dict[int, tuple[int, int]] = {}  # slot -> references, value
        self.layers = range(pool.layer_num)
        self.refusals = 0

    def step(self) -> None:
        """One operation, drawn at random, and what must hold after it."""
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

    def some(self, slots: Set[int] | dict[int, tuple[int, int]]) -> list[int]:
        return self.random.sample(sorted(slots), min(len(slots), self.random.randint(1, 5)))

    def prepare(self) -> None:
        count = self.random.randint(0, 6)
        free = self.store.num_slots - len(self.writing) - len(self.ready)
        slots = self.store.prepare_store(count)
        if count > free:
            assert slots is None
            self.refusals += 1
            return
        assert slots is not None
        taken = slots.tolist()
        assert len(set(taken)) == count
        assert not (self.writing | self.ready.keys()).intersection(taken)
        self.writing.update(taken)

    def alone(self) -> list[int]:
        """READY slots with one reference."""
        return [slot for slot, (references, _) in self.ready.items() if references == 1]

    def store_pages(self) -> None:
        self.write(self.some(self.writing), new=True)

    def store_again(self) -> None:
        self.write(self.some(set(self.alone())), new=False)

    def write(self, slots: list[int], *, new: bool) -> None:
        pages = self.random.sample(range(NUM_PAGES), len(slots))
        values = [self.random.randrange(256) for _ in slots]
        for page, value in zip(pages, values, strict=True):
            self.pool.fill(page, value)
        self.engine.store_pages(self.layers, pages, slots).wait()
        if new:
            self.store.complete_store(slots)
        self.writing.difference_update(slots)
        self.ready.update({slot: (1, value) for slot, value in zip(slots, values, strict=True)})

    def load_pages(self) -> None:
        slots = self.some(self.ready)
        slots += slots[:1]  # one slot to two pages
        pages = self.random.sample(range(NUM_PAGES), len(slots))
        self.engine.load_pages(self.layers, slots, pages).wait()
        assert [self.pool.value(page) for page in pages] == [self.ready[slot][1] for slot in slots]

    def share(self) -> None:
        slots = self.some(self.ready)
        self.store.share(slots)
        self.ready.update({slot: (self.ready[slot][0] + 1, self.ready[slot][1]) for slot in slots})

    def free(self) -> None:
        slots = self.some(self.writing | self.ready.keys())
        self.store.free(slots)
        for slot in slots:
            self.writing.discard(slot)
            references, value = self.ready.pop(slot, (0, 0))
            if references > 1:
                self.ready[slot] = references - 1, value

    def misuse(self) -> None:
        """What is forbidden for one slot of a batch is refused for all of it: `check` sees that nothing has changed."""
        free = set(range(self.store.num_slots)) - self.writing - self.ready.keys()
        alone = self.alone()
        lone = alone + sorted(self.writing)
        shared = self.ready.keys() - set(alone)
        attempts = [
            (self.store.free, self.some(self.writing), self.some(free)),
            (self.store.free, lone[:1], lone[:1]),
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

    def store_to(self, slots: list[int]) -> None:
        self.engine.store_pages(self.layers, range(len(slots)), slots)

    def load_from(self, slots: list[int]) -> None:
        self.engine.load_pages(self.layers, slots, range(len(slots)))

    def check(self) -> None:
        counts = self.store.counts()
        assert (counts.writing, counts.ready) == (len(self.writing), len(self.ready))
        assert counts.free + counts.used == self.store.num_slots
        references = torch.zeros(self.store.num_slots, dtype=torch.int64)
        references[sorted(self.writing)] = 1
        references[sorted(self.ready)] = torch.tensor(
            [self.ready[slot][0] for slot in sorted(self.ready)], dtype=torch.int64
        )
        assert torch.equal(self.store.references(range(self.store.num_slots)), references)
        self.store.audit()
