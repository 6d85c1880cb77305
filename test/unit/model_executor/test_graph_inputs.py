"""A group's rows in fixed memory: the inputs of each pass, and padding that changes no sequence."""

from __future__ import annotations

import torch
from toy_model import decode_batch

from sgl_batch.model_executor.graph_inputs import GraphInputs

MOST, HIDDEN = 8, 3
PADDING = {
    "input_ids": 0,
    "positions": 0,
    "out_cache_loc": 0,
    "req_pool_indices": 0,
    "seq_lens": 1,
    "orig_seq_lens": 1,
}


def loaded(num_rows: int, padded: int) -> GraphInputs:
    """Rows of a full group, then those of a smaller one with its padding."""
    rows = GraphInputs(MOST, decode_batch([3, 4]), HIDDEN, torch.float32)
    rows.load(decode_batch([20 + i for i in range(MOST)]), MOST)
    rows.load(decode_batch([5 + i for i in range(num_rows)]), padded)
    return rows


def test_a_batch_has_the_groups_rows_then_padding_at_position_0_and_kv_index_0_with_one_token() -> None:
    given, own = decode_batch([5, 6, 7, 8, 9]), loaded(5, 7).batch(decode_batch([1]), 7)
    for name, padding in PADDING.items():
        assert getattr(own, name).tolist() == [*getattr(given, name).tolist(), padding, padding], name
        assert getattr(own, name).dtype == getattr(given, name).dtype
    assert own.batch_size == 7
    assert own.forward_mode.is_decode()


def test_a_batch_has_no_lengths_on_the_host_because_they_change() -> None:
    own = loaded(5, 7).batch(decode_batch([1]), 7)
    assert own.seq_lens_cpu is None
    assert own.seq_lens_sum is None
    assert own.rids is None


def test_a_batch_of_one_pass_reads_the_rows_of_the_next() -> None:
    rows = loaded(5, 7)
    own = rows.batch(decode_batch([1]), 4)
    rows.load(decode_batch([50, 60, 70]), 4)
    assert own.positions.tolist() == [49, 59, 69, 0]


def test_its_bytes_are_those_of_its_fixed_memory() -> None:
    rows = loaded(4, 4)
    per_row = HIDDEN * 4 + sum(getattr(decode_batch([1]), name).element_size() for name in PADDING)
    assert rows.num_bytes == MOST * per_row
