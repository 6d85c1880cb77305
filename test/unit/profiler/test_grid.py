"""Which sizes are profiled: pairs of contexts, a range that each beginning covers, and limits."""

from __future__ import annotations

from collections import Counter

from sgl_batch.profiler.grid import sizes

WHOLE = sizes(most_rows=1024, most_tokens=4096, pool_tokens=1 << 16, context=4096)


def test_each_number_of_rows_has_two_contexts():
    counts = Counter((size.decode, size.rows) for size in WHOLE)
    assert set(counts.values()) == {2}
    assert {(True, 1), (True, 1024), (False, 16), (False, 4096)} <= set(counts)


def test_a_beginning_covers_both_phases_and_the_range():
    first = WHOLE[:12]
    decode, prefill = ({size.rows for size in first if size.decode is phase} for phase in (True, False))
    assert max(decode) >= 256
    assert min(decode) == 1
    assert max(prefill) >= 2048
    assert min(prefill) <= 32


def test_no_group_has_more_kv_than_the_pool_or_longer_sequences_than_the_context():
    for size in sizes(most_rows=512, most_tokens=2048, pool_tokens=8192, context=256):
        assert size.sequences * size.tokens <= 8192
        assert size.tokens < 256
