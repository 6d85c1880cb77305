"""What waits on the ranks of a node is for all of them: nothing is lost, and no time."""

from __future__ import annotations

import made_runs as made
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_batch.core.actions import Prefill
from sgl_batch.core.admission import Admission
from sgl_batch.core.rank_moves import Move
from sgl_batch.planner.workload import Request, Workload
from sgl_batch.simulator.kv_forms import RankPages
from sgl_batch.simulator.lengths import requests_like
from sgl_batch.simulator.node_pool import NodePool

FORMS = ["device", "inclusive", "exclusive", "streamed"]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90)), min_size=1, max_size=40),
    form=st.sampled_from(FORMS),
    node=st.sampled_from([2, 4]),
    pages=st.integers(12, 40),
)
def test_tokens_and_pages_are_conserved(lengths, form, node, pages):
    asked, memory = made.requests(lengths), RankPages(device=pages, store=4 * pages)
    run = made.instance(asked, made.plan(), form=form, ranks=4, memory=memory, pool=NodePool(node))
    run.run()
    tallies = [rank.tally for rank in run.ranks]
    assert sum(one.finished for one in tallies) == len(asked)
    assert sum(one.output_tokens for one in tallies) == int(asked.outputs.sum())
    assert sum(one.prompt_tokens for one in tallies) == int(asked.prompts.sum())
    for rank in run.ranks:
        assert rank.is_empty
        assert rank.form.device.reserved_pages == rank.form.admission.reserved_pages == 0
        assert rank.queue.tokens == 0


@pytest.mark.parametrize("form", ["inclusive", "streamed"])
@pytest.mark.parametrize("rows", [8, 16])
def test_where_lengths_differ_a_pool_takes_no_longer_than_moves_between_ranks(form, rows):
    """To within a hundredth: a rank that lacks sequences gets some of the others in either case."""
    asked = requests_like(Workload(requests=[Request(120, 60)], count=1), 40 * rows, cv=0.3)
    memory, runs = RankPages(device=18 * rows, store=40 * rows), []
    for pool in (None, NodePool(4)):
        plan = made.plan(decode=rows, prefill=1000)
        runs.append(made.instance(asked, plan, form=form, ranks=4, memory=memory, pool=pool).run())
    without, pooled = runs
    assert pooled.seconds <= 1.01 * without.seconds
    assert pooled.idle / pooled.seconds <= without.idle / without.seconds + 0.01


def test_queues_are_evened_out_within_a_node_alone():
    asked, plan = made.requests([(16, 16)] * 12), made.plan()
    run = made.instance(asked, plan, ranks=4)
    ranks = run.ranks
    for rank in ranks[1:]:
        rank.queue.give(len(rank.queue))
    kept = {one.sequence_id for one in ranks[0].queue}
    ranks[2].queue.add(11)
    NodePool(2).deal(ranks, plan)
    assert [len(rank.queue) for rank in ranks] == [2, 1, 1, 0]
    assert {one.sequence_id for rank in ranks[:2] for one in rank.queue} == kept
    assert [rank.queue.tokens for rank in ranks] == [32, 16, 16, 0]


def test_only_what_waits_in_the_memory_of_the_same_node_moves_without_a_copy():
    asked, pool = made.requests([(16, 40)] * 4), NodePool(2)
    for form, free in (("device", False), ("inclusive", True)):
        run = made.instance(asked, made.plan(), form=form, ranks=4)
        source = run.ranks[0]
        source.prefilled([_prefilling(source)])
        assert pool.is_free(Move(sequence_id="0", source=0, target=1), source) is free
        assert not pool.is_free(Move(sequence_id="0", source=0, target=2), source)


def _prefilling(rank):
    """Return the first queued sequence of a rank, whose prompt a pass computes now."""
    sequence = rank.queue[0]
    rank.prefill(Prefill(units=(Admission(leader=sequence),)))
    return sequence
