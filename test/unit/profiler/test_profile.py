"""Which samples of a profile count."""

from __future__ import annotations

from dataclasses import replace

import made_profiles as made

from sgl_batch.profiler.profile import middle


def test_the_middle_sample_of_a_size_counts():
    slow, usual, fast = (replace(made.profile().passes[0], experts_s=seconds) for seconds in (9.0, 2.0, 1.0))
    other = replace(slow, layers=3)
    assert middle([slow, other, fast, usual]) == (usual, other)
