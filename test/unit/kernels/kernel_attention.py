"""Attention of the native kernels against float64, over scattered pages in a pool that holds random bytes elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import sgl_batch_kernel as kernels
import torch
from kernel_checks import DTYPES, TOLERANCE, Check, relative_error, same_on_any_threads

# page, head dim, query heads, KV heads
SHAPES = (
    (64, 128, 16, 4),
    (64, 32, 2, 1),
    (16, 64, 4, 4),
    (64, 48, 6, 2),
    (8, 80, 26, 1),
    (80, 40, 4, 2),
    (32, 576, 4, 1),
    (2, 64, 2, 2),
    (128, 64, 8, 2),
)
# tokens of each sequence, and how many of them are new
CUTS = (
    ([1], [1]),
    ([64, 65, 1, 130], [1, 1, 1, 1]),
    ([50, 33, 90, 64], [1, 33, 20, 64]),
    ([200], [150]),
)
# A window of the tokens, and whether there are sinks.
FORMS = ((2, False), (64, True), (100, True))
LONG = ((64, 64, 4, 1), ([4096, 1000], [300, 1]))
# How many times as far apart scores are than in the other cases, where they are a few units from one another.
STEEPNESS = (40.0, 1000.0)
SCORE_ERROR = 1e-6  # of f32, for scores a few units from 0


def attention_cases() -> Iterator[Check]:
    for dtype, (shape, cut) in itertools.product(DTYPES, [*itertools.product(SHAPES, CUTS), LONG]):
        yield from attention_case(dtype, shape, *cut)
    for dtype, (window, has_sinks) in itertools.product(DTYPES, FORMS):
        options = {"window": window, "sinks": torch.linspace(-2, 4, 16) if has_sinks else None}
        yield from attention_case(dtype, SHAPES[0], *CUTS[2], **options)
        yield from attention_case(dtype, SHAPES[0], *CUTS[3], **options)
    for dtype, steepness in itertools.product(DTYPES, STEEPNESS):
        for shape, cut in ((SHAPES[0], CUTS[2]), (SHAPES[8], CUTS[3]), (SHAPES[5], CUTS[3])):
            yield from attention_case(dtype, shape, *cut, steepness=steepness)
        sinks = torch.linspace(-200, 400, 16)
        yield from attention_case(dtype, SHAPES[0], *CUTS[3], steepness=steepness, sinks=sinks, window=100)
    for dtype in DTYPES:
        yield from broken_number_case(dtype)
        for cut in (CUTS[0], CUTS[2]):
            yield from attention_case(dtype, SHAPES[0], *cut, sinks=torch.full((16,), float("-inf")))


def broken_number_case(dtype: torch.dtype) -> Iterator[Check]:
    """A key that is NaN or infinite: rows that see it are NaN, others stay as they were."""
    lengths, news, broken = [130], [130], 70
    q, k, v = draw(dtype, 64, (4, 2), lengths, news)
    whole = attend(q, news, lengths, in_pages(k, v, 64))
    for number in (float("nan"), float("inf")):
        k[0][broken, 0, 5] = number
        out = attend(q, news, lengths, in_pages(k, v, 64)).view(130, 4, 64)
        is_hit = torch.zeros(130, 4, 64, dtype=torch.bool)
        is_hit[broken:, :2] = (q.view(130, 4, 64)[broken:, :2, 5:6] > 0) | (number != number)
        yield f"attention {dtype} with a key of {number}: NaN", bool(out[is_hit].isnan().all())
        yield (
            f"attention {dtype} with a key of {number}: others",
            torch.equal(out[:broken], whole.view(130, 4, 64)[:broken]),
        )


def attention_case(
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    lengths: list[int],
    news: list[int],
    steepness: float = 1.0,
    **options: Any,
) -> Iterator[Check]:
    page, dim, q_heads, kv_heads = shape
    name = f"attention {dtype} page {page} dim {dim} heads {q_heads}/{kv_heads} {lengths} {news} {steepness} {options}"
    q, k, v = draw(dtype, dim, (q_heads, kv_heads), lengths, news)
    q *= steepness
    given = in_pages(k, v, page) | options
    out = attend(q, news, lengths, given)
    expected = attention_in_float64(q, k, v, news, dim**-0.5, **options)
    yield name, relative_error(out, expected) < TOLERANCE[dtype] + SCORE_ERROR * (steepness - 1)
    yield name + ": threads", same_on_any_threads(lambda: attend(q, news, lengths, given))
    yield name + ": row by row", torch.equal(row_by_row(q, news, lengths, given), out)
    if page in (16, 64):
        others = [attend(q, news, lengths, in_pages(k, v, other) | options) for other in (8, 32, 64, 256)]
        yield name + ": page sizes", all(torch.equal(other, out) for other in others)


def draw(dtype: torch.dtype, dim: int, heads: tuple[int, int], lengths: list[int], news: list[int]) -> Any:
    q_heads, kv_heads = heads
    q = torch.randn(sum(news), q_heads * dim).to(dtype)
    k = [torch.randn(length, kv_heads, dim).to(dtype) for length in lengths]
    v = [torch.randn(length, kv_heads, dim).to(dtype) for length in lengths]
    return q, k, v


def in_pages(k: list[torch.Tensor], v: list[torch.Tensor], page: int) -> dict[str, Any]:
    """Sequences in scattered pages of a pool that holds large rubbish everywhere else."""
    _, kv_heads, dim = k[0].shape
    counts = [-(-len(keys) // page) for keys in k]
    order = torch.randperm(sum(counts) + 3)[: sum(counts)]
    starts = [0, *itertools.accumulate(counts)]
    k_plain = torch.full((sum(counts) + 3, kv_heads, page, dim), 1e6).to(k[0].dtype)
    v_plain = k_plain.clone()
    for i, (keys, values) in enumerate(zip(k, v, strict=True)):
        at = torch.arange(len(keys))
        pages = order[starts[i] + at // page]
        k_plain[pages, :, at % page], v_plain[pages, :, at % page] = keys, values
    k_pages = k_plain.flatten(0, 1).contiguous()
    v_pages = v_plain.transpose(-1, -2).flatten(0, 1).contiguous()
    kernels.pack_(k_pages)
    kernels.pack_(v_pages)
    return {
        "k_pages": k_pages.view(-1, kv_heads, page * dim),
        "v_pages": v_pages.view(-1, kv_heads, page * dim),
        "table_starts": torch.tensor(starts[:-1]),
        "tables": order,
        "page_size": page,
        "head_dim": dim,
        "scaling": dim**-0.5,
    }


def attend(q: torch.Tensor, news: list[int], lengths: list[int], given: dict[str, Any]) -> torch.Tensor:
    starts = torch.tensor([0, *itertools.accumulate(news)])
    return kernels.attention(q, starts=starts, lengths=torch.tensor(lengths), **given)


def row_by_row(q: torch.Tensor, news: list[int], lengths: list[int], given: dict[str, Any]) -> torch.Tensor:
    """Every row as a piece of its own, as in decode."""
    rows = [
        (i, length - new + step + 1)
        for i, (length, new) in enumerate(zip(lengths, news, strict=True))
        for step in range(new)
    ]
    starts = given["table_starts"][[i for i, _ in rows]]
    return attend(q, [1] * len(rows), [seen for _, seen in rows], {**given, "table_starts": starts})


def attention_in_float64(q, k, v, news, scaling, window=0, sinks=None) -> torch.Tensor:
    parts, row = [], 0
    for keys, values, new in zip(k, v, news, strict=True):
        length, kv_heads, dim = keys.shape
        queries = q[row : row + new].double().view(new, kv_heads, -1, dim)
        by_kv_head = torch.einsum("nkgd,tkd->kgnt", queries, keys.double()) * scaling
        scores = by_kv_head.flatten(0, 1)
        behind = torch.arange(length - new, length)[:, None] - torch.arange(length)
        scores = scores.masked_fill((behind < 0) | (behind >= (window or length)), float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, new, 1)), -1)
        shares = scores.softmax(-1)[..., :length].view_as(by_kv_head)
        parts.append(torch.einsum("kgnt,tkd->nkgd", shares, values.double()).flatten(1))
        row += new
    return torch.cat(parts)
