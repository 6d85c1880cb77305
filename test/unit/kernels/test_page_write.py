"""Keys and values are written to pages where attention reads them, and no other byte of a page changes."""

from __future__ import annotations

import pytest
import sgl_batch_kernel
import torch

from sgl_batch.mem_cache.page_layout import page_layout

NUM_PAGES = 9


def pools_of(heads: int, page_size: int, head_dim: int, dtype: torch.dtype, fill: float) -> list[torch.Tensor]:
    layout = page_layout(heads=heads, page_size=page_size, head_dim=head_dim, dtype=dtype, native=True)
    return [torch.full((NUM_PAGES, *shape), fill, dtype=dtype) for shape in (layout.key_shape, layout.value_shape)]


def expected(
    pools: list[torch.Tensor], kv_indices: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, page_size: int
) -> list[torch.Tensor]:
    """Return the pools after each number is written to its offset in the packed order."""
    k_pages, v_pages = (pool.clone() for pool in pools)
    width, step, value_width = k_pages.shape[4], k_pages.shape[5], v_pages.shape[4]
    for row, kv_index in enumerate(kv_indices.tolist()):
        page, offset = divmod(kv_index, page_size)
        for d in range(keys.shape[2]):
            k_pages[page, :, offset // width, d // step, offset % width, d % step] = keys[row, :, d]
            v_pages[page, :, d // value_width, offset // step, d % value_width, offset % step] = values[row, :, d]
    return [k_pages, v_pages]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "page_size", "head_dim"), [(2, 64, 64), (3, 6, 20), (1, 32, 96)])
def test_rows_are_written_to_their_kv_indices_only(heads, page_size, head_dim, dtype):
    generator = torch.Generator().manual_seed(page_size)
    kv_indices = torch.randperm(NUM_PAGES * page_size, generator=generator)[: NUM_PAGES * page_size // 3]
    # Keys and values as views of one product, as attention layers give them.
    qkv = torch.randn(len(kv_indices), 3 * heads * head_dim, generator=generator).to(dtype)
    _, keys, values = (part.view(-1, heads, head_dim) for part in qkv.chunk(3, dim=1))
    pools = pools_of(heads, page_size, head_dim, dtype, fill=7.0)
    wanted = expected(pools, kv_indices, keys, values, page_size)
    sgl_batch_kernel.write_pages(*pools, kv_indices, keys, values)
    for pool, right in zip(pools, wanted, strict=True):
        assert torch.equal(pool, right)


@pytest.mark.parametrize("kv_index", [-1, NUM_PAGES * 64])
def test_a_kv_index_outside_of_the_pages_is_refused(kv_index):
    pools = pools_of(2, 64, 64, torch.bfloat16, fill=7.0)
    rows = torch.zeros(1, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=rf"slot {kv_index} of {NUM_PAGES * 64}"):
        sgl_batch_kernel.write_pages(*pools, torch.tensor([kv_index]), rows, rows)
    assert all((pool == 7.0).all() for pool in pools)


def test_rows_of_another_number_type_are_refused():
    pools = pools_of(2, 64, 64, torch.bfloat16, fill=7.0)
    rows = torch.zeros(1, 2, 64)
    with pytest.raises(RuntimeError, match=r"rows are Float.* pages of BFloat16"):
        sgl_batch_kernel.write_pages(*pools, torch.tensor([0]), rows, rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [1, 63, 300])
def test_rows_of_a_table_are_written_by_their_numbers(count, dtype):
    generator = torch.Generator().manual_seed(count)
    slots = torch.randperm(500, generator=generator)[:count]
    rows = torch.randn(count, 96, generator=generator).to(dtype)[:, 10:90]  # with gaps between them
    table = torch.full((500, 80), 7.0, dtype=dtype)
    wanted = table.clone()
    wanted[slots] = rows
    sgl_batch_kernel.write_rows(table, slots, rows)
    assert torch.equal(table, wanted)


@pytest.mark.parametrize(
    ("slots", "rows", "message"),
    [
        (torch.tensor([2, 9]), torch.zeros(2, 4), "slot 9 of 9"),
        (torch.tensor([-1]), torch.zeros(1, 4), "slot -1 of 9"),
        (torch.tensor([1]), torch.zeros(2, 4), r"rows are Float\[2, 4\] .* for 1 slots and a table of Float\[9, 4\]"),
        (torch.tensor([1]), torch.zeros(1, 5), r"rows are Float\[1, 5\]"),
        (torch.tensor([1]), torch.zeros(1, 4, dtype=torch.bfloat16), r"rows are BFloat16.* a table of Float"),
        (torch.tensor([1], dtype=torch.int32), torch.zeros(1, 4), "slots"),
    ],
    ids=["beyond", "below", "count", "width", "number type", "index type"],
)
def test_rows_that_do_not_fit_a_table_are_refused(slots, rows, message):
    table = torch.full((9, 4), 7.0)
    with pytest.raises((RuntimeError, ValueError), match=message):
        sgl_batch_kernel.write_rows(table, slots, rows)
    assert (table == 7.0).all()
