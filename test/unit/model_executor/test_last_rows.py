"""The last layer keeps the rows that the head reads, in their order, whatever the sub-batches and groups."""

from __future__ import annotations

import itertools

import pytest
import torch
from sequence_builders import in_force
from toy_model import ToyBackend, ToyFamily, ToyModel, by_hand, decode_batch, extend_batch

from sgl_batch.core.plan import PhasePlan, Plan, row_spans
from sgl_batch.core.units import FUSED, SPLIT
from sgl_batch.metrics.counters import Counters
from sgl_batch.model_executor.batch_split import split
from sgl_batch.model_executor.group_pass import Part
from sgl_batch.model_executor.last_rows import last_rows
from sgl_batch.model_executor.layer_runner import LayerRunner

NEWS, COUNTS = [4, 6, 1, 9], [1, 3, 1, 9]
ENDS = list(itertools.accumulate(NEWS))
READ = [row for end, count in zip(ENDS, COUNTS, strict=True) for row in range(end - count, end)]


class NarrowingBackend(ToyBackend):
    """Notes of how many last rows of each piece attention is asked for."""

    def of_last_rows(self, metadata, counts):
        return metadata, counts


def parts_of(b_attn: int, *, decode_rows: int = 0) -> list[Part]:
    parts, first = [], 0
    for batch in [*([decode_batch([5] * decode_rows)] if decode_rows else []), extend_batch([0, 3, 0, 1], NEWS)]:
        rows = len(batch.input_ids)
        subs = split(batch, row_spans(rows, b_attn), first_row=first)
        for sub in subs:
            sub.attn_metadata = sub.span
        parts.append(Part(batch=batch, span=(first, first + rows), sub_batches=subs))
        first += rows
    return parts


@pytest.mark.parametrize("by_sub_batch", [False, True])
@pytest.mark.parametrize("decode_rows", [0, 5])
@pytest.mark.parametrize("b_attn", [1, 2, 3, 7, 100])
def test_kept_rows_are_those_that_are_read_and_lie_one_after_the_other(b_attn, decode_rows, by_sub_batch):
    parts = parts_of(b_attn, decode_rows=decode_rows)
    wanted = [*([None] if decode_rows else []), COUNTS]
    subs = [sub for part in parts for sub in part.sub_batches]
    kept = last_rows(parts, wanted, NarrowingBackend(), by_sub_batch=by_sub_batch)
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
    assert found == [*range(decode_rows), *(decode_rows + row for row in READ)]


def test_nothing_is_left_out_where_all_rows_are_read():
    assert last_rows(parts_of(3), [None], ToyBackend(), by_sub_batch=False) is None
    assert last_rows(parts_of(3), [NEWS], ToyBackend(), by_sub_batch=False) is None


@pytest.mark.parametrize("option", [SPLIT, FUSED])
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("all_rows", [False, True])
def test_the_last_layers_experts_compute_the_read_rows_alone_unless_all_are_asked_for(all_rows, num_layers, option):
    phase = PhasePlan(b_attn=8, b_moe=100, yield_option=option)
    plan = Plan(prefill=phase, decode=phase, page_size=8, boundary_tokens=8, refill_watermark=0.5, ready_target=8)
    model, backend = ToyModel(num_layers), ToyBackend()
    family = ToyFamily(backend)
    runner = LayerRunner(
        model=model,
        family=family,
        attn_backend=backend,
        in_force=in_force(plan),
        counters=Counters(),
        can_reenter=True,
        expert_part="experts",
    )
    runner.all_rows = all_rows
    batch = extend_batch([0, 3, 0, 1], NEWS)
    logits, _ = runner.forward(batch)
    assert torch.equal(logits, by_hand(model, batch))
    every = [20] if option == SPLIT else [8, 8, 4]
    read = [4] if option == SPLIT else [1, 2, 1]
    expected = dict.fromkeys(range(num_layers), every)
    assert family.expert_rows == expected | ({} if all_rows else {num_layers - 1: read})
