"""Owns the measured attention calls: decode by context and batch, prefill by prompt length."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kernel_rates.memory_probe import page_reads
from kernel_rates.shapes import Shapes
from kernel_rates.work import Work
from sgl_batch.mem_cache.device_page_pool import lazy_zeros

PAGE = 64
DECODE = "decode attention"
_LONGEST_PROMPT = 4096


class Pages:
    """Keys and values of bf16 in pages, as in an engine's pool; each call takes other pages."""

    def __init__(self, shapes: Shapes, num_pages: int) -> None:
        self.shapes, self.num_pages = shapes, num_pages
        shape = (num_pages, shapes.kv_heads, PAGE * shapes.head_dim)
        # The memory of a real pool: on huge pages if the operating system grants them.
        self.keys = lazy_zeros(shape, torch.bfloat16).normal_()
        self.values = lazy_zeros(shape, torch.bfloat16).normal_()

    def call(self, kernels: Any, new_tokens: list[int], lengths: list[int]) -> Callable[[], object]:
        """Return attention of sequences of `lengths` tokens, of which the last `new_tokens` are new."""
        shapes = self.shapes
        counts = [-(-length // PAGE) for length in lengths]
        needed, order = sum(counts), torch.randperm(self.num_pages)
        assert needed <= self.num_pages, f"{needed} pages of {self.num_pages}"
        tables = itertools.cycle([order[i * needed : (i + 1) * needed] for i in range(self.num_pages // needed)])
        q = torch.randn(sum(new_tokens), shapes.q_heads * shapes.head_dim).bfloat16()
        given = {
            "starts": torch.tensor([0, *itertools.accumulate(new_tokens)]),
            "lengths": torch.tensor(lengths),
            "table_starts": torch.tensor([0, *itertools.accumulate(counts)][:-1]),
            "page_size": PAGE,
            "head_dim": shapes.head_dim,
            "scaling": shapes.head_dim**-0.5,
        }
        return lambda: kernels.attention(q, self.keys, self.values, tables=next(tables), **given)


def attention_work(kernels: Any, shapes: Shapes, contexts: list[int], batches: list[int]) -> Iterator[Work]:
    """Return reads of pages, decode attention, which reads every sequence's whole context once, and that of prompts."""
    needed = max(batches) * -(-max(contexts) // PAGE)
    pages = Pages(shapes, max(needed, _LONGEST_PROMPT // PAGE))
    yield from page_reads(pages.keys[0].nbytes, pages.keys.nbytes + pages.values.nbytes)
    token_bytes = 2 * 2 * shapes.kv_heads * shapes.head_dim
    token_flops = 4 * shapes.q_heads * shapes.head_dim
    for context, batch in itertools.product(contexts, batches):
        tokens = context * batch
        yield Work(
            table=DECODE,
            row=f"{context} x {batch}",
            by="sgl_batch",
            flops=token_flops * tokens,
            num_bytes=token_bytes * tokens,
            run=pages.call(kernels, [1] * batch, [context] * batch),
        )
    yield from _prefill_work(kernels, shapes, pages)


def _prefill_work(kernels: Any, shapes: Shapes, pages: Pages) -> Iterator[Work]:
    """Return prompts of one sub-batch of 2,048 tokens; the last is half of a prompt whose first half is cached."""
    for row, new, length in (
        ("16 x 128", 128, 128),
        ("2 x 1024", 1024, 1024),
        ("1 x 2048 of 4096", 2048, _LONGEST_PROMPT),
    ):
        count = 2048 // new
        seen = new * (length - new) + new * (new + 1) // 2
        yield Work(
            table="prefill attention",
            row=row,
            by="sgl_batch",
            flops=4 * shapes.q_heads * shapes.head_dim * seen * count,
            num_bytes=2 * 2 * shapes.kv_heads * shapes.head_dim * length * count,
            run=pages.call(kernels, [new] * count, [length] * count),
        )
