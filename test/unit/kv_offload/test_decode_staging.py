"""Decode KV is streamed to the device by layer and sub-batch, and the pages that a step changes go back."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from copy_engines import ENGINES, keeps_checksums
from staged_pool import LAYERS, PAGE, StagedPool

from sgl_batch.core.decode_streaming import StreamedPart, StreamedRow, lay_out
from sgl_batch.kv_offload.decode_staging import DecodeStaging, PartCopies
from sgl_batch.kv_offload.host_kv_store import HostKVStore
from sgl_batch.kv_offload.native_copy_engine import NativeCopyEngine
from sgl_batch.kv_offload.store_geometry import StoreGeometry

FIRST = 100


class Group:
    """Sequences that grow by a token a step. A token's KV encodes its row, its position and the layer."""

    def __init__(self, store: HostKVStore, half_pages: int, num_rows: int, seed: int) -> None:
        self.store, self.half_pages, self.random = store, half_pages, random.Random(seed)
        self.blocks: list[list[int]] = [[] for _ in range(num_rows)]
        self.tokens = [0] * num_rows

    def copies(self) -> list[PartCopies]:
        """Return the copies of the coming step, which opens a page after a full one."""
        new = [row for row, tokens in enumerate(self.tokens) if tokens % PAGE == 0]
        for row, block in zip(new, self.store.prepare_store(len(new)).tolist(), strict=True):
            self.blocks[row].append(block)
        self.new = [self.blocks[row][-1] for row in new]
        rows = [StreamedRow(store_blocks=tuple(blocks[:-1]), own_pages=1) for blocks in self.blocks]
        parts = lay_out(rows, half_pages=self.half_pages, most_rows=self.random.randint(1, 4))
        return [self._copies_of(part) for part in parts]

    def _copies_of(self, part: StreamedPart) -> PartCopies:
        load: list[tuple[int, int]] = []
        last = []
        for row in range(part.start, part.end):
            pages = part.pages[row - part.start]
            load += list(zip(self.blocks[row], pages, strict=True))[: -(-self.tokens[row] // PAGE)]
            last.append((pages[-1], self.blocks[row][-1]))
        blocks, pages = (torch.tensor([pair[side] for pair in load], dtype=torch.int64) for side in (0, 1))
        store_pages, store_blocks = (torch.tensor([pair[side] for pair in last]) for side in (0, 1))
        return PartCopies(
            span=(part.start, part.end),
            part=part,
            load_blocks=blocks,
            load_pages=pages,
            store_pages=store_pages,
            store_blocks=store_blocks,
        )

    def step(self, pool: StagedPool, staging: DecodeStaging) -> None:
        """Run a forward pass: check each sub-batch's KV in each layer, and write the KV of a new token."""
        copies = self.copies()
        staging.begin(copies)
        staging.redirect_pool()
        assert pool.first_page == FIRST
        staging.restore_pool()
        assert pool.first_page == 0
        assert staging.spans[0][0] == 0
        assert staging.spans[-1][1] == len(self.tokens)
        for layer in range(LAYERS):
            for index, one in enumerate(copies):
                staging.before_attention(layer, index)
                assert pool.first_page == FIRST
                keys = pool.page_parts(layer)[0]
                for row, pages in zip(range(*one.span), one.part.pages, strict=True):
                    found = keys[pages].flatten(0, 1)[: self.tokens[row], 0]
                    assert found.tolist() == [1000 * row + 10 * at + layer for at in range(self.tokens[row])]
                    page, offset = divmod(self.tokens[row], PAGE)
                    keys[pages[page], offset] = 1000 * row + 10 * self.tokens[row] + layer
                staging.after_attention(layer, index, one.span[1])
                assert pool.first_page == 0, "between sub-batches the pool's layers point to its own pages"
        staging.end()
        self.store.complete_store(self.new)
        self.tokens = [tokens + 1 for tokens in self.tokens]

    def leave(self) -> None:
        """End the last row's sequence."""
        self.store.free(self.blocks.pop())
        self.tokens.pop()


@pytest.mark.parametrize("kind", ENGINES)
def test_a_group_larger_than_the_device_reads_all_its_kv_in_every_step(kind: str) -> None:
    pool = StagedPool()
    geometry = StoreGeometry.of_pool(pool, checksums=keeps_checksums(kind))
    with HostKVStore.create(geometry, num_bytes=4 << 20) as store:
        staging = DecodeStaging(pool, ENGINES[kind](store), first_page=FIRST)
        group = Group(store, staging.half_pages, num_rows=11, seed=len(kind))
        for _ in range(3 * PAGE):
            group.step(pool, staging)
        while len(group.tokens) > 1:
            group.leave()
            group.step(pool, staging)
        assert pool.first_page == 0
        while group.tokens[0] <= staging.half_pages * PAGE:
            group.step(pool, staging)
        group.step(pool, staging)
        group.leave()
        assert store.counts().used == 0
        staging.close()


def test_a_new_block_for_an_open_page_is_read_from_the_next_step_on() -> None:
    pool = StagedPool()
    with HostKVStore.create(StoreGeometry.of_pool(pool), num_bytes=1 << 20) as store:
        engine = NativeCopyEngine(store, pool)
        staging = DecodeStaging(pool, ENGINES["one thread"](store), first_page=FIRST)
        group = Group(store, staging.half_pages, num_rows=1, seed=0)
        group.step(pool, staging)
        (shared,), (own,) = group.blocks[0], store.prepare_store(1).tolist()
        store.share([shared])
        (copies,) = group.copies()
        staging.begin([replace(copies, store_blocks=torch.tensor([own]))])
        for layer in range(LAYERS):
            staging.before_attention(layer, 0)
            pool.page_parts(layer)[0][copies.part.pages[0][0], 1] = 10 + layer
            staging.after_attention(layer, 0, 1)
        staging.end()
        store.complete_store([own])
        group.blocks, group.tokens = [[own]], [2]
        group.step(pool, staging)
        engine.load_pages(range(LAYERS), [shared], [8]).wait()
        first, second = pool.page_parts(2)[0][8, :2, 0].tolist()
        assert first == 2.0
        assert second != 12.0, "the shared block is unchanged"
        staging.close()
        engine.close()
