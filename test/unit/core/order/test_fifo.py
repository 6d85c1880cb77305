"""FIFO looks at the order of arrival and at nothing else."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_batch.core.order.fifo import FifoOrder
from sgl_batch.core.sequence import Sequence

# No deadline: a busy machine is no fault of the code.
QUICK = settings(max_examples=60, deadline=None)


@QUICK
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 999), st.integers(0, 999)), unique_by=lambda t: t[0]))
def test_arrival_alone_gives_the_order_and_no_two_share_a_key(requests):
    sequences = [
        Sequence(sequence_id=str(prompt), arrival=arrival, prompt_tokens=prompt, max_new_tokens=new)
        for arrival, prompt, new in requests
    ]
    keys = [FifoOrder().key(sequence) for sequence in sequences]
    assert len(set(keys)) == len(keys)
    in_order = [sequence.arrival for sequence in sorted(sequences, key=FifoOrder().key)]
    assert in_order == sorted(arrival for arrival, _, _ in requests)
