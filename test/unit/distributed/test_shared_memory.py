"""Shared memory that cannot be had is refused with a remedy. Tests of dispatchers cover several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sgl_batch.distributed.shared_memory import shared_regions
from sgl_batch.errors import EngineError


@pytest.fixture
def lone_rank(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    return dist.ProcessGroupGloo(store, 0, 1)


def test_a_region_is_zero_and_takes_no_memory_before_it_is_written(lone_rank):
    (region,) = shared_regions(lone_rank, 1 << 40)
    region[(1 << 40) - 4 :] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    assert region[(1 << 40) - 8 :].tolist() == [0, 0, 0, 0, 1, 2, 3, 4]


def test_too_much_address_space_is_refused_with_a_remedy(lone_rank):
    with pytest.raises(EngineError, match=r"cannot share 1073741824 MiB .* --token-dispatcher gloo"):
        shared_regions(lone_rank, 1 << 50)
