"""The last layer keeps the rows that the head reads, in their order, whatever the sub-batches and groups."""

from __future__ import annotations

import itertools

import pytest
from toy_model import ToyBackend, decode_batch, extend_batch

from sgl_batch.core.plan import row_spans
from sgl_batch.model_executor.batch_split import split
from sgl_batch.model_executor.group_pass import Part
from sgl_batch.model_executor.last_rows import last_rows

NEWS, COUNTS = [4, 6, 1, 9], [1, 3, 1, 9]
ENDS = list(itertools.accumulate(NEWS))
READ = [row for end, count in zip(ENDS, COUNTS, strict=True) for row in range(end - count, end)]


class NarrowingBackend(ToyBackend):
    """Notes of how many last rows of each piece attention is asked for."""

    def of_last_rows(self, metadata, counts, rows):
        return metadata, counts, rows


def parts_of(b_attn: int, read: list[int] | None, *, decode_rows: int = 0) -> list[Part]:
    parts, first = [], 0
    for batch in [*([decode_batch([5] * decode_rows)] if decode_rows else []), extend_batch([0, 3, 0, 1], NEWS)]:
        rows = len(batch.input_ids)
        subs = split(batch, row_spans(rows, b_attn), first_row=first)
        for sub in subs:
            sub.attn_metadata = sub.span
        own = None if batch.forward_mode.is_decode() else read
        parts.append(Part(batch=batch, span=(first, first + rows), sub_batches=subs, read=own))
        first += rows
    return parts


@pytest.mark.parametrize("by_sub_batch", [False, True])
@pytest.mark.parametrize("decode_rows", [0, 5])
@pytest.mark.parametrize("b_attn", [1, 2, 3, 7, 100])
def test_kept_rows_are_those_that_are_read_and_lie_one_after_the_other(b_attn, decode_rows, by_sub_batch):
    parts = parts_of(b_attn, COUNTS, decode_rows=decode_rows)
    subs = [sub for part in parts for sub in part.sub_batches]
    kept = last_rows(parts, NarrowingBackend(), by_sub_batch=by_sub_batch)
    found, end = [], 0
    for sub, one in zip(subs, kept, strict=True):
        numbers = range(sub.span[1] - sub.span[0]) if one.index is None else one.index.tolist()
        count = one.span[1] - one.span[0]
        assert one.span[0] == (0 if by_sub_batch else end)
        end = one.span[1]
        assert len(numbers) == max(count, 1), "a layer's modules always have a row"
        found += [sub.span[0] + number for number in numbers][:count]
        if one.index is None or count == 0:
            assert one.attn_metadata == sub.span
        else:
            assert one.attn_metadata[0] == sub.span
            assert sum(one.attn_metadata[1]) == count
            assert one.attn_metadata[2] is one.index
    assert found == [*range(decode_rows), *(decode_rows + row for row in READ)]


def test_nothing_is_left_out_where_all_rows_are_read():
    assert last_rows(parts_of(3, None), ToyBackend(), by_sub_batch=False) is None
    assert last_rows(parts_of(3, NEWS), ToyBackend(), by_sub_batch=False) is None
