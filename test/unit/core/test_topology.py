"""A global rank has a stage, an attention rank and an expert shard, which are numbered separately."""

from __future__ import annotations

import pytest

from sgl_batch.core.topology import RankPart, Role, Topology, check_runnable
from sgl_batch.errors import ConfigError

# Two ranks with sequences, and two that compute experts for both.
APART = Topology(
    (
        RankPart(expert_shard=1),
        RankPart(expert_shard=0),
        RankPart(attention_rank=0),
        RankPart(attention_rank=1),
    )
)
STAGES = Topology.uniform(2, num_stages=2)
# A shard that is used often is on two ranks.
REPLICATED = Topology(
    (
        RankPart(attention_rank=0, expert_shard=0),
        RankPart(attention_rank=1, expert_shard=1),
        RankPart(attention_rank=2, expert_shard=0),
    )
)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_layout_that_runs_has_one_stage_where_each_rank_is_its_own_attention_rank_and_shard(num_ranks):
    topology = Topology.uniform(num_ranks)
    counts = (topology.num_ranks, topology.num_stages, topology.num_attention_ranks, topology.num_expert_shards)
    assert counts == (num_ranks, 1, num_ranks, num_ranks)
    assert topology.control_rank == 0
    for rank, part in enumerate(topology.parts):
        assert part == RankPart(stage=0, attention_rank=rank, expert_shard=rank)
        assert part.role is Role.BOTH
        assert (topology.rank_of_attention(rank), topology.holders(rank)) == (rank, (rank,))
    check_runnable(topology)


def test_attention_and_experts_may_be_on_separate_ranks():
    assert (APART.num_ranks, APART.num_attention_ranks, APART.num_expert_shards) == (4, 2, 2)
    assert [part.role for part in APART.parts] == [Role.EXPERTS, Role.EXPERTS, Role.ATTENTION, Role.ATTENTION]
    assert [APART.rank_of_attention(number) for number in (0, 1)] == [2, 3]
    assert [APART.holders(shard) for shard in (0, 1)] == [(1,), (0,)]
    assert APART.control_rank == 2


def test_stages_have_attention_ranks_and_shards_of_their_own():
    assert (STAGES.num_ranks, STAGES.num_stages, STAGES.num_attention_ranks, STAGES.num_expert_shards) == (4, 2, 2, 2)
    assert [part.stage for part in STAGES.parts] == [0, 0, 1, 1]
    assert [STAGES.holders(1, stage=stage) for stage in (0, 1)] == [(1,), (3,)]
    assert [STAGES.rank_of_attention(0, stage=stage) for stage in (0, 1)] == [0, 2]
    assert STAGES.control_rank == 0


def test_several_ranks_may_hold_the_same_shard():
    assert (REPLICATED.num_attention_ranks, REPLICATED.num_expert_shards) == (3, 2)
    assert REPLICATED.holders(0) == (0, 2)


@pytest.mark.parametrize(
    ("topology", "named"),
    [
        (APART, "rank 0 of the layout has the role 'experts' alone"),
        (STAGES, "the layout has 2 pipeline stages"),
        (REPLICATED, "rank 2 of the layout is attention rank 2 with shard 0"),
        (
            Topology((RankPart(attention_rank=1, expert_shard=1), RankPart(attention_rank=0, expert_shard=0))),
            "rank 0 of the layout is attention rank 1 with shard 1",
        ),
    ],
)
def test_a_layout_that_does_not_run_yet_is_refused_by_name(topology, named):
    with pytest.raises(ConfigError, match=f"^{named}; in this release .* leave --pp-size out$"):
        check_runnable(topology)


@pytest.mark.parametrize(
    "parts",
    [
        (RankPart(attention_rank=0), RankPart(attention_rank=0, expert_shard=0)),
        (RankPart(attention_rank=0, expert_shard=0), RankPart(attention_rank=2, expert_shard=1)),
        (RankPart(attention_rank=0, expert_shard=1),),
        (RankPart(attention_rank=0, expert_shard=0), RankPart(stage=1, attention_rank=0)),
        (RankPart(attention_rank=0, expert_shard=0), RankPart()),
    ],
    ids=["two attention ranks 0", "a gap", "no shard 0", "a stage without experts", "a rank without a part"],
)
def test_parts_that_give_work_to_no_rank_or_to_two_are_a_fault(parts):
    with pytest.raises(AssertionError):
        Topology(parts)
