"""The last sequences of a simulated batch go on in sets of ranks where they end sooner so."""

from __future__ import annotations

from dataclasses import replace

import made_runs as made
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_batch.simulator.kv_forms import RankPages
from sgl_batch.simulator.partition import TailForms

CHANGE_S = 0.1
ROOMY = RankPages(device=400, store=800)


def shared(ranks: int, fixed_s: float = 2e-4) -> made.LineCosts:
    """Return costs of a set that has a part of each row's work on each rank, and less that does not depend on rows."""
    whole = made.LineCosts()
    return replace(
        whole, fixed_s=fixed_s, row_s=whole.row_s / ranks, context_s=whole.context_s / ranks, move_s=whole.move_s
    )


def tail(ranks: int, *sizes: int) -> TailForms:
    sets = {size: (shared(size), 1 << 20) for size in sizes}
    return TailForms.of(ranks, made.LineCosts(), sets, change_s=CHANGE_S)


def test_one_long_sequence_ends_sooner():
    asked = made.requests([(16, 20)] * 15 + [(16, 600)])
    runs = [
        made.instance(asked, made.plan(), ranks=4, memory=ROOMY, long_tail=tail(4, 4) if on else None)
        for on in (False, True)
    ]
    seconds = [run.run().seconds for run in runs]
    found = runs[1].account.partitioned
    assert found is not None
    assert (found.sequences, found.ranks) == (1, 4)
    assert runs[1].account.parts["partition"] == CHANGE_S
    assert seconds[1] < 0.6 * seconds[0]
    assert sum(rank.tally.finished for rank in runs[1].ranks) == len(asked)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=24),
    long=st.lists(st.integers(100, 500), max_size=6),
    form=st.sampled_from(["device", "inclusive", "streamed"]),
    ranks=st.sampled_from([2, 4]),
    spare=st.sampled_from([0, 30]),
)
def test_tokens_are_conserved_and_little_time_is_lost(lengths, long, form, ranks, spare):
    """A step of sets is never longer here than that of all ranks, so that what can be lost is the change itself."""
    asked = made.requests([*lengths, *((20, output) for output in long)], spare=spare)
    seconds, moved_s = [], 0.0
    for long_tail in (None, tail(ranks, 2, ranks)):
        run = made.instance(asked, made.plan(), form=form, ranks=ranks, memory=ROOMY, long_tail=long_tail)
        account = run.run()
        tallies = [rank.tally for rank in run.ranks]
        assert sum(one.finished for one in tallies) == len(asked)
        assert sum(one.output_tokens for one in tallies) == int(asked.outputs.sum())
        assert sum(one.prompt_tokens for one in tallies) == int(asked.prompts.sum())
        assert all(rank.is_empty and not rank.form.device.reserved_pages for rank in run.ranks)
        assert account.seconds == pytest.approx(sum(account.parts.values()))
        seconds.append(account.seconds)
        moved_s = account.parts["copies"]
    assert seconds[1] <= seconds[0] + CHANGE_S + moved_s + 1e-9


@settings(max_examples=20, deadline=None)
@given(count=st.integers(1, 40), length=st.integers(1, 300), ranks=st.sampled_from([2, 4]))
def test_where_all_lengths_are_equal_nothing_is_lost(count, length, ranks):
    asked = made.requests([(16, length)] * count)
    seconds = [
        made.instance(asked, made.plan(), ranks=ranks, memory=ROOMY, long_tail=one).run().seconds
        for one in (None, tail(ranks, ranks))
    ]
    assert seconds[1] <= seconds[0] * 1.001
