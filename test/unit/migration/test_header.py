"""A header is the same after it was sent. An invalid one is refused where it is made and where it is read."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_batch.migration.header import SequenceHeader

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def header(**changes) -> SequenceHeader:
    fields = {
        "sequence_id": "a",
        "prompt_tokens": [1, 2, 3],
        "generated_tokens": [4],
        "seed": 2**63,
        "sampling": {"temperature": 0.5},
        "progress": {},
        "position": 3,
        "num_pages": 2,
        "num_layers": 3,
        "page_shapes": ((2, 8, 4), (2, 8, 6)),
        "page_dtype": "bfloat16",
    }
    return SequenceHeader(**{**fields, **changes})


@given(sampling=st.dictionaries(st.text(), PLAIN, max_size=5), progress=st.dictionaries(st.text(), PLAIN, max_size=5))
def test_plain_data_survives_the_wire_unchanged(sampling, progress):
    before = header(sampling=sampling, progress=progress)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(before), type=SequenceHeader) == before


def test_tensors_are_listed_by_layer_then_part_then_page():
    assert list(header(num_layers=2).tensor_shapes()) == [(2, 8, 4), (2, 8, 4), (2, 8, 6), (2, 8, 6)] * 2
    assert header().num_tensors == len(list(header().tensor_shapes())) == 12


def test_a_sequence_without_kv_has_no_tensors():
    assert list(header(num_pages=0, position=0).tensor_shapes()) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"position": 5}, "position 5 of 4 tokens"),
        ({"position": -1}, "position -1 of 4 tokens"),
        ({"num_pages": -1}, "-1 pages of 3 layers"),
        ({"num_layers": 0}, "2 pages of 0 layers"),
        ({"page_shapes": ()}, "2 pages of 3 layers"),
        ({"page_shapes": ((2, 0, 4),)}, "sizes are positive"),
    ],
)
def test_an_invalid_header_is_refused_where_it_is_made_and_where_it_is_read(changes, reason):
    with pytest.raises(ValueError, match=reason):
        header(**changes)
    fields = {**msgspec.to_builtins(header()), **changes}
    with pytest.raises(msgspec.ValidationError, match=reason):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=SequenceHeader)
