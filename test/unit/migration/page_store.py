"""A small store of sequences with real pages for tests: keys and values by layer, a free list, and an account."""

from __future__ import annotations

import hashlib
import random

import torch

from sgl_batch.migration.header import SequenceHeader
from sgl_batch.migration.store import Export, Refusal, Reservation

NUM_LAYERS = 3
PAGE_SHAPE = (2, 8, 4)  # heads, tokens, dim
PAGE_TOKENS = PAGE_SHAPE[1]


class PageStore:
    """Implements SequenceStore over tensors [num_pages, *PAGE_SHAPE] for keys and values of each layer.

    `copies`: what is released stays, and what is adopted is a replica, of which `replicas` has the names.
    """

    def __init__(
        self,
        num_pages: int,
        *,
        num_layers: int = NUM_LAYERS,
        page_shape: tuple[int, ...] = PAGE_SHAPE,
        copies: bool = False,
    ) -> None:
        self.copies = copies
        self.replicas: set[str] = set()
        self.num_pages, self.num_layers, self.page_shape = num_pages, num_layers, page_shape
        self._parts = [
            [torch.zeros(num_pages, *page_shape, dtype=torch.bfloat16) for _ in range(num_layers)] for _ in range(2)
        ]
        self._free = list(range(num_pages))
        self._reserved: dict[int, list[int]] = {}
        self.headers: dict[str, SequenceHeader] = {}
        self._pages: dict[str, list[int]] = {}

    def put(self, sequence_id: str, num_pages: int, seed: int = 0) -> None:
        """Add a sequence of random tokens whose KV fills `num_pages` pages with random numbers."""
        assert num_pages <= len(self._free), "the test puts more than the pool holds"
        rng = random.Random(f"{sequence_id}-{seed}")
        position = max(num_pages * self.page_shape[1] - rng.randrange(self.page_shape[1]), 0)
        prompt = rng.randint(0, position)
        tokens = [rng.randrange(200_000) for _ in range(position + 1)]
        self.headers[sequence_id] = SequenceHeader(
            sequence_id=sequence_id,
            prompt_tokens=tokens[:prompt],
            generated_tokens=tokens[prompt:],
            seed=rng.getrandbits(63),
            sampling={"temperature": rng.random(), "stop": ["\n", "é"], "max_new_tokens": 4096, "regex": None},
            progress={"penalties": {"17": 3}, "finished": False, "tail": rng.randbytes(5)},
            position=position,
            num_pages=num_pages,
            num_layers=self.num_layers,
            page_shapes=(self.page_shape, self.page_shape),
            page_dtype="bfloat16",
        )
        self._pages[sequence_id] = pages = [self._free.pop() for _ in range(num_pages)]
        generator = torch.Generator().manual_seed(rng.getrandbits(31))
        for tensor in self._views(pages):
            tensor.copy_(torch.rand(self.page_shape, generator=generator))

    def fingerprint(self, sequence_id: str) -> tuple[SequenceHeader, str]:
        """The header and a digest of the KV bytes."""
        digest = hashlib.blake2b()
        for tensor in self._views(self._pages[sequence_id]):
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return self.headers[sequence_id], digest.hexdigest()

    def everything(self) -> dict[str, tuple[SequenceHeader, str]]:
        """The fingerprints of all sequences here."""
        return {sequence_id: self.fingerprint(sequence_id) for sequence_id in self.headers}

    def check_account(self, *, reserved: int = 0) -> None:
        """Check that every page is free, reserved, or belongs to one sequence."""
        held = [page for pages in (*self._pages.values(), *self._reserved.values()) for page in pages]
        assert sorted([*held, *self._free]) == list(range(self.num_pages))
        assert sum(map(len, self._reserved.values())) == reserved

    def _views(self, pages: list[int]) -> list[torch.Tensor]:
        layers = range(self.num_layers)
        return [self._parts[part][layer][page] for layer in layers for part in range(2) for page in pages]

    # The calls of SequenceStore.

    def export(self, sequence_id: str) -> Export:
        return Export(header=self.headers[sequence_id], tensors=self._views(self._pages[sequence_id]))

    def reserve(self, header: SequenceHeader) -> Reservation | Refusal:
        if header.num_pages > len(self._free):
            return Refusal(reason=f"{header.num_pages} pages are needed, {len(self._free)} are free")
        pages = [self._free.pop() for _ in range(header.num_pages)]
        reservation = Reservation(tensors=self._views(pages))
        self._reserved[id(reservation)] = pages
        return reservation

    def adopt(self, header: SequenceHeader, reservation: Reservation) -> None:
        assert header.sequence_id not in self.headers, f"{header.sequence_id} is here already"
        self.headers[header.sequence_id] = header
        self._pages[header.sequence_id] = self._reserved.pop(id(reservation))
        if self.copies:
            self.replicas.add(header.sequence_id)

    def cancel(self, header: SequenceHeader, reservation: Reservation) -> None:
        self._free += self._reserved.pop(id(reservation))

    def release(self, sequence_id: str) -> None:
        if self.copies:
            return
        del self.headers[sequence_id]
        self._free += self._pages.pop(sequence_id)
