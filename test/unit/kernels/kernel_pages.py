"""Cases of writing pages: runs of tokens that begin and end anywhere, compared with writing one number at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import sgl_batch_kernel as kernels
import torch
from kernel_checks import DTYPES, Check

NUM_PAGES = 9
PANEL = 32
UNTOUCHED = 7.0


def page_cases() -> Iterator[Check]:
    shapes = ((2, 64, 64), (3, 6, 20), (1, 32, 96), (1, 128, 30))
    for dtype, (heads, page_size, head_dim), seed in itertools.product(DTYPES, shapes, range(4)):
        generator = torch.Generator().manual_seed(seed)
        kv_indices = _runs_of_kv_indices(page_size, generator)
        # Keys and values as views of one product, as attention layers give them.
        qkv = torch.randn(len(kv_indices), 3 * heads * head_dim, generator=generator).to(dtype)
        _, keys, values = (part.view(-1, heads, head_dim) for part in qkv.chunk(3, dim=1))
        plain = torch.full((2, heads, NUM_PAGES * page_size, head_dim), UNTOUCHED, dtype=dtype)
        plain[0, :, kv_indices], plain[1, :, kv_indices] = keys.transpose(0, 1), values.transpose(0, 1)
        wanted = _packed_keys(plain[0], page_size), _packed_values(plain[1], page_size)
        pools = tuple(torch.full_like(pool, UNTOUCHED) for pool in wanted)
        kernels.write_pages(pools[0], pools[1], kv_indices, keys, values)
        name = f"write_pages {dtype} {heads} {page_size} {head_dim} {seed}"
        yield name + ": keys", torch.equal(pools[0], wanted[0])
        yield name + ": values", torch.equal(pools[1], wanted[1])


def _runs_of_kv_indices(page_size: int, generator: torch.Generator) -> torch.Tensor:
    """Return KV indices of several sequences in any order, with gaps; runs may cross pages; no index occurs twice."""
    runs, start, end = [], 0, NUM_PAGES * page_size
    while start < end:
        start += int(torch.randint(0, 3, (), generator=generator))
        length = int(torch.randint(1, page_size + 20, (), generator=generator))
        runs.append(torch.arange(min(start, end), min(start + length, end)))
        start += length
    return torch.cat([runs[index] for index in torch.randperm(len(runs), generator=generator).tolist()])


def _packed_keys(plain_HND: torch.Tensor, page_size: int) -> torch.Tensor:
    heads, _, dim = plain_HND.shape
    width, step = min(page_size, PANEL), 2 if plain_HND.dtype == torch.bfloat16 else 1
    cut = plain_HND.view(heads, NUM_PAGES, page_size // width, width, dim // step, step)
    return cut.permute(1, 0, 2, 4, 3, 5).contiguous()


def _packed_values(plain_HND: torch.Tensor, page_size: int) -> torch.Tensor:
    heads, _, dim = plain_HND.shape
    width, step = min(dim, PANEL), 2 if plain_HND.dtype == torch.bfloat16 else 1
    cut = plain_HND.view(heads, NUM_PAGES, page_size // step, step, dim // width, width)
    return cut.permute(1, 0, 4, 2, 5, 3).contiguous()
