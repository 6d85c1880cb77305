"""Ranks agree over a channel: all get the same step, each rank its own actions, and a rank that fails is named."""

from __future__ import annotations

from functools import partial

import pytest
import sgl_batch_kernel
import torch
from rank_builders import PLAN, in_set, movable, running
from rank_builders import rank as a_rank
from rank_wires import MemoryChannel, all_at_once, in_memory, over_sockets
from sequence_builders import choices, sequence

from sgl_batch.core.rank_agreement import GroupStep, RankHeader, StepKind, next_step
from sgl_batch.core.rank_moves import Migration
from sgl_batch.core.rank_state import RankState
from sgl_batch.core.topology import Topology
from sgl_batch.distributed.rank_errors import PeerLost, PeerTimeout
from sgl_batch.distributed.shared_memory_all_gather import ALL_GATHER_BYTES, SharedMemoryAllGather
from sgl_batch.errors import EngineError
from sgl_batch.managers import rank_messages
from sgl_batch.managers.rank_group import RankGroup
from sgl_batch.managers.rank_messages import (
    BoundaryActions,
    HeaderMessage,
    PartitionRow,
    StepMessage,
    message_of,
)

SOON_S = 10.0  # for what happens at once, on however busy a machine


def group_of(
    channel,
    num_ranks: int,
    *,
    timeout_s: float = SOON_S,
    migration: Migration = Migration.EVEN,
    all_gather: SharedMemoryAllGather | None = None,
) -> RankGroup:
    return RankGroup(
        channel, Topology.uniform(num_ranks), migration=migration, timeout_s=timeout_s, all_gather=all_gather
    )


def all_gathers_of(num_ranks: int) -> list[SharedMemoryAllGather]:
    regions = [torch.zeros(ALL_GATHER_BYTES, dtype=torch.uint8) for _ in range(num_ranks)]
    return [SharedMemoryAllGather(regions, rank, sgl_batch_kernel, timeout_s=SOON_S) for rank in range(num_ranks)]


def header(running: int = 0, waiting: int = 0, forked: int = 0, *, due: bool = False) -> RankHeader:
    return RankHeader(running=running, waiting=waiting, forked=forked, due=due)


def decided(channels, states: list[RankState], migration: Migration = Migration.EVEN) -> list[BoundaryActions]:
    groups = [group_of(channel, len(states), migration=migration) for channel in channels]
    calls = [partial(group.decide, message_of(state), PLAN) for group, state in zip(groups, states, strict=True)]
    return all_at_once(calls)


# Steps.


@pytest.mark.parametrize("with_all_gather", [False, True], ids=["channel", "all_gather"])
@pytest.mark.parametrize("open_channels", [in_memory, over_sockets])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_all_ranks_get_the_same_step(open_channels, num_ranks, with_all_gather):
    all_gathers = all_gathers_of(num_ranks) if with_all_gather else [None] * num_ranks
    rounds = [
        [header() for _ in range(num_ranks)],
        [header(running=rank) for rank in range(1, num_ranks + 1)],
        [header(running=1, due=rank == num_ranks - 1) for rank in range(num_ranks)],
        [RankHeader(running=1, waiting=0, forked=0, due=False, plan_changes=rank + 2) for rank in range(num_ranks)],
        [header(forked=200 * rank + 1) for rank in range(num_ranks)],
    ]
    with open_channels(num_ranks) as channels:
        groups = [
            group_of(channel, num_ranks, all_gather=all_gather)
            for channel, all_gather in zip(channels, all_gathers, strict=True)
        ]
        for headers in rounds:
            calls = [partial(group.agree, own, PLAN) for group, own in zip(groups, headers, strict=True)]
            assert all_at_once(calls) == [next_step(headers, PLAN)] * num_ranks


def test_a_rank_that_knows_the_step_may_send_its_state_before_others_know_it():
    """The control rank may receive the state of one rank before it has sent the step to another."""
    with in_memory(3) as channels:
        groups = [group_of(channel, 3) for channel in channels]
        states = [message_of(a_rank(queued=[sequence(rank)])) for rank in range(3)]

        def step_and_boundary(rank: int) -> tuple[GroupStep, list[list[str]]]:
            step = groups[rank].agree(header(waiting=1), PLAN)
            return step, groups[rank].decide(states[rank], PLAN).units

        done = all_at_once([partial(step_and_boundary, rank) for rank in range(3)])
        assert done == [(GroupStep(kind=StepKind.BOUNDARY), [[f"s{rank}"]]) for rank in range(3)]


# Actions at a boundary.


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_actions_have_each_ranks_own_prefill(num_ranks):
    with in_memory(num_ranks) as channels:
        states = [
            a_rank(queued=[sequence(rank, prompt=20), *choices(2, first=50 + 10 * rank, group=f"g{rank}")])
            for rank in range(num_ranks)
        ]
        actions = decided(channels, states)
    for rank, own in enumerate(actions):
        assert own.units == [[f"s{rank}"], [f"s{50 + 10 * rank}", f"s{51 + 10 * rank}"]]
        assert (own.prefill, own.busy, own.refill, own.moves) == (True, True, [], [])


def test_actions_have_each_ranks_own_refill_and_the_moves_of_all():
    moving = [movable(arrival) for arrival in range(4)]
    with in_memory(3) as channels:
        actions = decided(channels, [a_rank(ready=moving), a_rank(), a_rank(ready=[movable(9)])])
    assert [own.refill for own in actions] == [["s2", "s3"], ["s0", "s1"], ["s9"]]
    assert {(own.prefill, own.busy, own.expert_calls) for own in actions} == {(False, True, 1)}
    assert actions[0].moves == actions[1].moves == actions[2].moves


def test_the_migration_mode_of_the_control_rank_counts():
    moving = [movable(arrival) for arrival in range(4)]
    with in_memory(2) as channels:
        actions = decided(channels, [a_rank(ready=moving), a_rank()], Migration.NEVER)
    assert [own.moves for own in actions] == [[], []]


def test_a_rank_without_rows_learns_that_others_are_busy():
    with in_memory(2) as channels:
        actions = decided(channels, [a_rank(), a_rank(unmovable_running=3)])
    assert actions[0] == BoundaryActions(
        prefill=False, busy=True, expert_calls=1, moves=[], units=[], refill=[], copies=[], ends=[], partitions=[]
    )


def test_all_ranks_get_the_order_to_partition_and_to_end_it_with_the_owner_of_each_sequence():
    states = [a_rank(runs=running(2)), a_rank(runs=running(1, first=5))]
    with in_memory(2) as channels:
        actions = decided(channels, states, Migration.PARTITION)
        ended = decided(channels, [in_set(states[0], {0, 1}, 1), in_set(states[1], {0, 1}, 2)], Migration.PARTITION)
    assert [own.partitions for own in actions] == [[PartitionRow(["s0", "s1", "s5"], [0, 0, 1], [0, 1])]] * 2
    assert [(own.ends, own.partitions, own.busy) for own in ended] == [([[0, 1]], [], True)] * 2


@pytest.mark.parametrize("with_all_gather", [False, True], ids=["channel", "all_gather"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_all_are_done_if_every_rank_is(num_ranks, with_all_gather):
    all_gathers = all_gathers_of(num_ranks) if with_all_gather else [None] * num_ranks
    with in_memory(num_ranks) as channels:
        groups = [
            group_of(channel, num_ranks, all_gather=all_gather)
            for channel, all_gather in zip(channels, all_gathers, strict=True)
        ]
        for missing in [None, *range(num_ranks)]:
            calls = [partial(group.all_done, group.rank != missing) for group in groups]
            assert all_at_once(calls) == [missing is None] * num_ranks


def test_a_prompt_group_that_the_limit_cuts_is_prefilled_in_parts(monkeypatch):
    """The leader shares its prompt with the choices that are sent; the others compute the prompt themselves."""
    monkeypatch.setattr(rank_messages, "MOST_QUEUED", 3)
    queue = [sequence(0), *choices(5, first=1)]
    with in_memory(2) as channels:
        first = decided(channels, [a_rank(), a_rank(queued=queue)])[1]
        assert first.units == [["s0"], ["s1", "s2"]]
        rest = decided(channels, [a_rank(), a_rank(queued=queue[3:])])[1]
    assert rest.units == [["s3"], ["s4"], ["s5"]]


# Faults.


def test_a_message_of_another_kind_is_an_error_that_names_it_and_its_sender():
    with in_memory(2) as (first, second):
        second.send(0, message_of(a_rank()))
        with pytest.raises(
            EngineError,
            match="rank 1 sent StateMessage where rank 0 awaited what it has to do next: the ranks run different steps",
        ):
            group_of(first, 2).agree(header(), PLAN)


def test_an_answer_of_another_kind_is_an_error_at_its_receiver():
    with in_memory(2) as (first, second):
        first.send(1, StepMessage("decode", 1, 0, True))
        with pytest.raises(EngineError, match="rank 0 sent StepMessage where rank 1 awaited its actions at a boundary"):
            group_of(second, 2).decide(message_of(a_rank()), PLAN)


@pytest.mark.parametrize("open_channels", [in_memory, over_sockets])
def test_the_control_rank_names_a_dead_rank(open_channels):
    with open_channels(3) as (first, second, third):
        second.send(0, HeaderMessage(0, 0, 0, False, 0))
        third.close()
        with pytest.raises(
            PeerLost, match=r"rank 2 closed its connection .* waiting for what it has to do next"
        ) as lost:
            group_of(first, 3).agree(header(), PLAN)
        assert lost.value.rank == 2


@pytest.mark.parametrize("open_channels", [in_memory, over_sockets])
def test_the_death_of_the_control_rank_ends_the_wait_of_the_others(open_channels):
    with open_channels(2) as (first, second):

        def receive_and_die() -> None:
            first.recv([1], timeout_s=SOON_S, awaiting="a state")
            first.close()

        waits = partial(group_of(second, 2).decide, message_of(a_rank()), PLAN)
        with pytest.raises(PeerLost, match=r"rank 0 closed its connection .* waiting for its actions") as lost:
            all_at_once([receive_and_die, waits])
        assert lost.value.rank == 0


def test_a_silent_rank_is_named_with_what_was_awaited():
    with in_memory(4) as (first, second, *_):
        second.send(0, HeaderMessage(0, 0, 0, False, 0))
        with pytest.raises(PeerTimeout, match=r"ranks 2, 3: waited 0\.02 s for what it has to do next"):
            group_of(first, 4, timeout_s=0.02).agree(header(), PLAN)


def test_a_wake_does_not_end_the_wait_for_others():
    with in_memory(2) as (first, second):
        first.wake()
        second.send(0, HeaderMessage(1, 0, 0, False, 0))
        assert group_of(first, 2).agree(header(), PLAN).kind is StepKind.DECODE


def test_a_lone_rank_sends_and_awaits_no_message():
    class Silent(MemoryChannel):
        def send(self, peer, message):
            raise AssertionError("there is no other rank")

        recv = send

    with in_memory(1) as (channel,):
        alone = group_of(Silent(0, channel._wires), 1)
        assert alone.agree(header(running=1), PLAN).kind is StepKind.DECODE
        assert alone.decide(message_of(a_rank(unmovable_running=1)), PLAN).busy
