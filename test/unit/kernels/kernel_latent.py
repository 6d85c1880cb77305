"""The kernels of latent attention against float64, over awkward shapes. Unwritten memory holds NaN."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import sgl_batch_kernel as kernels
import torch
from kernel_attention import attention_in_float64
from kernel_checks import DTYPES, TOLERANCE, Check, relative_error

# page, row, value, heads: DeepSeek's own sizes, the tiny checkpoint's, and sizes that fit no vector, tile or block.
SHAPES = (
    (64, 576, 512, 16),
    (64, 576, 512, 80),
    (16, 80, 64, 4),
    (128, 72, 64, 17),
    (64, 50, 50, 66),
    (8, 36, 22, 3),
    (2, 34, 32, 1),
)
# tokens of each sequence, and how many of them are new rows
CUTS = (
    ([1], [1]),
    ([64, 65, 1, 130, 300], [1, 1, 1, 1, 1]),
    ([50, 33, 90, 64], [1, 33, 20, 64]),
    ([200], [150]),
)


def latent_cases() -> Iterator[Check]:
    return itertools.chain(_attention_cases(), _extreme_cases(), _linear_cases())


def sequences(dtype: torch.dtype, row: int, heads: int, lengths: list[int], news: list[int]) -> dict[str, object]:
    """Rows of each sequence's tokens, and queries of its new ones."""
    queries = torch.randn(sum(news), heads * row + 2).to(dtype)[:, : heads * row]
    return {"rows": [torch.randn(length, row).to(dtype) for length in lengths], "queries": queries, "news": news}


def in_pages(rows: list[torch.Tensor], page: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows in scattered pages of a pool that is NaN everywhere else; the pages, and where each sequence's begin."""
    counts = [-(-len(own) // page) for own in rows]
    order = torch.randperm(sum(counts) + 3)[: sum(counts)]
    starts = [0, *itertools.accumulate(counts)][:-1]
    pool = torch.full((sum(counts) + 3, page, rows[0].shape[1]), float("nan")).to(rows[0].dtype)
    for own, start in zip(rows, starts, strict=True):
        at = torch.arange(len(own))
        pool[order[start + at // page], at % page] = own
    return pool, order, torch.tensor(starts)


def attend(given: dict[str, object], page: int, value: int, *, scaling: float) -> torch.Tensor:
    pool, tables, table_starts = in_pages(given["rows"], page)
    return kernels.latent_attention(
        given["queries"],
        pool,
        starts=torch.tensor([0, *itertools.accumulate(given["news"])]),
        lengths=torch.tensor([len(own) for own in given["rows"]]),
        table_starts=table_starts,
        tables=tables,
        value_dim=value,
        scaling=scaling,
    )


def rows_alone(given: dict[str, object]) -> Iterator[tuple[int, dict[str, object]]]:
    """Every fifth row, from each sequence's last back, as a decode step of its sequence up to it, by itself."""
    row = 0
    for own, new in zip(given["rows"], given["news"], strict=True):
        for before in range(0, new, 5):
            at = row + new - 1 - before
            yield at, {"rows": [own[: len(own) - before]], "queries": given["queries"][at : at + 1], "news": [1]}
        row += new


def _attention_cases() -> Iterator[Check]:
    threads = torch.get_num_threads()
    for dtype, (page, row, value, heads), (lengths, news) in itertools.product(DTYPES, SHAPES, CUTS):
        name = f"latent attention {dtype} page {page} row {row} value {value} heads {heads} {lengths} {news}"
        given, scaling = sequences(dtype, row, heads, lengths, news), row**-0.5
        out = attend(given, page, value, scaling=scaling)
        keys = [own[:, None] for own in given["rows"]]
        expected = attention_in_float64(
            given["queries"].contiguous(), keys, [k[..., :value] for k in keys], news, scaling
        )
        yield name, relative_error(out, expected) < TOLERANCE[dtype]
        yield name + ": repeated", torch.equal(attend(given, page, value, scaling=scaling), out)
        yield name + ": other pages", torch.equal(attend(given, 24, value, scaling=scaling), out)
        torch.set_num_threads(1)
        yield name + ": one thread", torch.equal(attend(given, page, value, scaling=scaling), out)
        torch.set_num_threads(threads)
        if heads < 70:
            same = [
                torch.equal(attend(single, page, value, scaling=scaling), out[at : at + 1])
                for at, single in rows_alone(given)
            ]
            yield name + ": a row's bits", all(same)


def _extreme_cases() -> Iterator[Check]:
    """Check scores far apart: one token takes all the weight, at any index, and nothing overflows."""
    for dtype, row in itertools.product(DTYPES, (0, 63, 64, 129)):
        rows = torch.randn(130, 80).to(dtype)
        queries = torch.randn(1, 3 * 80).to(dtype)
        rows[row] = 100 * queries[0, :80]
        out = attend({"rows": [rows], "queries": queries, "news": [1]}, 16, 64, scaling=1.0)
        taken = relative_error(out[:, :64], rows[row, None, :64].double()) < TOLERANCE[dtype]
        yield f"one token takes all {dtype} {row}", taken and bool(torch.isfinite(out).all())


def _linear_cases() -> Iterator[Check]:
    shapes = ((1, 16, 512, 128), (13, 4, 64, 32), (97, 3, 33, 48), (200, 1, 20, 2), (0, 2, 32, 32))
    for dtype, (rows, heads, n, k) in itertools.product(DTYPES, shapes):
        name = f"linear_by_head {dtype} {rows}x{heads}x{n}x{k}"
        weight = (torch.randn(heads, n, k) / k**0.5).to(dtype)
        x = torch.randn(rows, heads, k + 6).to(dtype)[..., 4 : 4 + k]
        expected = torch.einsum("thk,hnk->thn", x.double(), weight.double())
        kernels.pack_(weight)
        wide = torch.full((rows, heads, n + 5), float("nan")).to(dtype)
        kernels.linear_by_head(x, weight, wide[..., :n])
        out = wide[..., :n]
        yield name, relative_error(out, expected) < TOLERANCE[dtype]
        yield name + ": no other element is written", bool(wide[..., n:].isnan().all())
        one_by_one = torch.empty(rows, heads, n, dtype=dtype)
        for row in range(rows):
            kernels.linear_by_head(x[row : row + 1], weight, one_by_one[row : row + 1])
        yield name + ": a row's bits", torch.equal(one_by_one, out)
