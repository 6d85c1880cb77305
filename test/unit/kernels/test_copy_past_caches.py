"""A copy past the caches has all bytes of its source wherever both begin, and none beside them changes."""

from __future__ import annotations

import pytest
import torch
from sgl_batch_kernel import copy_past_caches_

_ROOM = 128
_PIECE = 256 << 10


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 1000, _PIECE - 1, _PIECE, _PIECE + 1, 4 * _PIECE + 77])
@pytest.mark.parametrize(("to", "source"), [(0, 0), (1, 0), (0, 3), (63, 17), (40, 8)])
def test_bytes_are_copied_and_no_others(count: int, to: int, source: int) -> None:
    given = torch.randint(0, 256, (count + _ROOM,), dtype=torch.uint8)
    found = torch.full_like(given, 7)
    copy_past_caches_(found[to : to + count], given[source : source + count])
    assert torch.equal(found[to : to + count], given[source : source + count])
    assert (found[:to] == 7).all()
    assert (found[to + count :] == 7).all()


def test_tensors_of_any_number_type_are_copied() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8):
        given, found = torch.randn(33, 130).to(dtype), torch.zeros(33, 130, dtype=dtype)
        copy_past_caches_(found, given)
        assert torch.equal(found.view(torch.uint8), given.view(torch.uint8))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (torch.zeros(3), r"source is Float\[3\] and to is Float\[2, 2\]"),
        (torch.zeros(2, 2).bfloat16(), r"source is BFloat16\[2, 2\] and to is Float\[2, 2\]"),
        (torch.zeros(2, 4)[:, ::2], "contiguous tensors"),
    ],
)
def test_other_tensors_are_refused(source: torch.Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        copy_past_caches_(torch.zeros(2, 2), source)
