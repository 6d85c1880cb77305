"""Sub-batches cover a group's rows once, and each describes its own rows as a forward batch of its own would."""

from __future__ import annotations

import copy
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_model import decode_batch, extend_batch

from host_syncs import HostSyncs
from sgl_batch.core.plan import row_spans
from sgl_batch.model_executor.batch_split import split

# No deadline: a busy machine is no fault of the code.
QUICK = settings(max_examples=100, deadline=None)

b_attns = st.integers(1, 70)
prompts = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=8)


def cut(batch, b_attn: int):
    return split(batch, row_spans(len(batch.input_ids), b_attn))


def joined(sub_batches, name: str) -> list[int]:
    return torch.cat([getattr(sub.forward_batch, name) for sub in sub_batches]).tolist()


def check_cover(batch, sub_batches, b_attn: int) -> None:
    """Every row is in one sub-batch, in order, and there are no more sub-batches than needed."""
    num_rows = len(batch.input_ids)
    assert [row for sub in sub_batches for row in range(*sub.span)] == list(range(num_rows))
    assert len(sub_batches) == math.ceil(num_rows / b_attn)
    for sub in sub_batches:
        assert len(sub.forward_batch.input_ids) == sub.span[1] - sub.span[0] <= b_attn
        assert sub.forward_batch.forward_mode is batch.forward_mode
    for name in ("input_ids", "positions", "out_cache_loc"):
        assert joined(sub_batches, name) == getattr(batch, name).tolist()


@QUICK
@given(st.lists(st.integers(1, 700), min_size=1, max_size=80), b_attns)
def test_a_decode_group_is_cut_by_sequences(lengths, b_attn):
    batch = decode_batch(lengths)
    sub_batches = cut(batch, b_attn)
    check_cover(batch, sub_batches, b_attn)
    for name in ("req_pool_indices", "seq_lens", "seq_lens_cpu", "orig_seq_lens"):
        assert joined(sub_batches, name) == getattr(batch, name).tolist()
    for sub in sub_batches:
        part = sub.forward_batch
        assert part.batch_size == len(part.seq_lens) == len(part.input_ids)
        assert part.seq_lens_sum == sum(lengths[slice(*sub.span)])


@QUICK
@given(prompts, b_attns)
def test_a_prefill_group_is_cut_by_tokens_and_a_longer_sequence_chunked(spans, b_attn):
    prefixes, news = [list(part) for part in zip(*spans, strict=True)]
    batch = extend_batch(prefixes, news)
    sub_batches = cut(batch, b_attn)
    check_cover(batch, sub_batches, b_attn)
    done = dict(zip(batch.req_pool_indices.tolist(), prefixes, strict=True))
    for sub in sub_batches:
        part = sub.forward_batch
        pieces = zip(part.req_pool_indices.tolist(), part.extend_prefix_lens_cpu, part.extend_seq_lens_cpu, strict=True)
        for request, prefix, new in pieces:
            assert prefix == done[request], "a chunk begins where the one before ended"
            done[request] += new
    assert list(done.values()) == batch.seq_lens.tolist()


@QUICK
@given(prompts, b_attns)
def test_the_fields_of_a_prefill_sub_batch_agree_with_each_other(spans, b_attn):
    prefixes, news = [list(part) for part in zip(*spans, strict=True)]
    for sub in cut(extend_batch(prefixes, news), b_attn):
        part = sub.forward_batch
        starts, lengths = part.extend_prefix_lens_cpu, part.extend_seq_lens_cpu
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        rows = [p for start, end in zip(starts, ends, strict=True) for p in range(start, end)]
        assert part.positions.tolist() == rows
        assert part.extend_prefix_lens.tolist() == starts
        assert part.extend_seq_lens.tolist() == lengths
        assert part.seq_lens.tolist() == part.seq_lens_cpu.tolist() == ends
        assert part.seq_lens_sum == sum(ends)
        assert part.extend_num_tokens == len(rows)
        assert part.extend_start_loc.tolist() == [sum(lengths[:i]) for i in range(len(lengths))]
        assert part.batch_size == len(lengths) == len(part.req_pool_indices) == len(part.orig_seq_lens)


def test_a_group_that_fits_one_sub_batch_is_not_copied():
    for batch in (decode_batch([3, 4]), extend_batch([0, 7], [1, 1])):
        (sub,) = cut(batch, 2)
        assert sub.forward_batch is batch
        assert sub.span == (0, 2)


def test_cutting_leaves_the_group_as_it_was():
    for batch in (decode_batch([3, 4, 5]), extend_batch([0, 7], [4, 6])):
        before = copy.deepcopy(vars(batch))
        cut(batch, 2)
        assert vars(batch).keys() == before.keys()
        for name, value in vars(batch).items():
            same = torch.equal(value, before[name]) if torch.is_tensor(value) else value == before[name]
            assert same, name


def test_cutting_a_group_makes_the_host_wait_for_nothing():
    groups = decode_batch([5, 70, 12]), extend_batch([0, 16, 3], [30, 9, 20])
    with HostSyncs() as syncs:
        for batch in groups:
            batch.seq_lens_cpu = torch.tensor(batch.seq_lens_cpu.tolist())  # the host's, as a scheduler makes it
            syncs.take()
            assert len(cut(batch, 2)) > 1
            assert not syncs.take()
