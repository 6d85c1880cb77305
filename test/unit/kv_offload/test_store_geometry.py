"""Parts of a block are aligned and do not overlap; a page's size follows from its pool."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_batch.errors import ConfigError
from sgl_batch.kv_offload.store_geometry import StoreGeometry
from sgl_batch.mem_cache.latent_page_pool import LatentPagePool


@given(
    num_layers=st.integers(1, 100),
    part_bytes=st.lists(st.integers(1, 10_000), min_size=1, max_size=8).map(tuple),
    checksums=st.booleans(),
)
def test_parts_checksums_and_layers_follow_each_other_without_overlap(num_layers, part_bytes, checksums):
    geometry = StoreGeometry(num_layers=num_layers, part_bytes=part_bytes, checksums=checksums)
    end = 0
    for offset, num_bytes in zip(geometry.part_offsets, part_bytes, strict=True):
        assert offset % 64 == 0
        assert offset >= end
        end = offset + num_bytes
    if checksums:
        assert geometry.checksum_offset is not None
        assert geometry.checksum_offset >= end
        end = geometry.checksum_offset + 8
    assert end <= geometry.layer_bytes
    assert geometry.layer_bytes % 64 == 0
    assert geometry.block_bytes % 4096 == 0
    assert 0 <= geometry.block_bytes - num_layers * geometry.layer_bytes < 4096


def test_a_large_models_page_needs_no_padding():
    geometry = StoreGeometry(num_layers=48, part_bytes=(128 << 10, 128 << 10))
    assert geometry.block_bytes == 48 * 2 * (128 << 10)


def test_a_pools_geometry_is_its_pages():
    pool = LatentPagePool(10 * 8, 8, torch.bfloat16, 6, 2, 3, "cpu", False)
    assert StoreGeometry.of_pool(pool) == StoreGeometry(num_layers=3, part_bytes=(8 * 8 * 2,))


def test_layers_of_different_sizes_are_refused():
    layers = [(torch.zeros(4, 8),), (torch.zeros(4, 9),)]
    pool = SimpleNamespace(layer_num=2, page_parts=layers.__getitem__)
    with pytest.raises(ConfigError, match=r"2 different sizes in its layers \(\[\(32,\), \(36,\)\] bytes\)"):
        StoreGeometry.of_pool(pool)
