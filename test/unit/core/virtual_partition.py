"""Owns partitions of virtual ranks: replicas are made together or not at all, run with their set, and go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from virtual_sequences import Batch, Running

from sgl_batch.core.actions import Partition
from sgl_batch.core.coroutine import Event, advance
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.primitives import migrate, partition
from sgl_batch.core.sequence import SequenceState, Status

if TYPE_CHECKING:
    from virtual_rank import VirtualRank


def replica_ledger(ledger: PageLedger) -> PageLedger:
    """Return the account in which replicas reserve pages: the rank's own or, where that is of a store, the device's."""
    return PageLedger(1 << 20, ledger.page_size) if ledger.pool_pages else ledger


def is_replica(sequence: SequenceState) -> bool:
    return sequence.status is Status.REPLICA


def set_of(running: Running) -> frozenset[int]:
    """Return the set of ranks over which these sequences are partitioned; empty if they are not."""
    return next((one.ranks for one in running.reqs if len(one.ranks) > 1), frozenset())


def num_replicas(running: Running) -> int:
    return sum(map(is_replica, running.reqs))


def begin(ranks: Sequence[VirtualRank], asked: Sequence[Partition], takes: Callable[[str], bool]) -> bool:
    """Make the replicas of all these partitions, and join them; nothing if a rank refuses one. Return whether."""
    if not all(takes(one.sequence_id) for whole in asked for one in whole.sequences):
        return False
    for whole in asked:
        for number in whole.ranks:
            _join(ranks, number, whole)
        for number in whole.ranks:  # when all ranks have copied
            for one in ranks[number].running.reqs:
                one.ranks = whole.ranks
    return True


def _join(ranks: Sequence[VirtualRank], number: int, whole: Partition) -> None:
    rank, rows = ranks[number], []
    own = {one.sequence_id: one for one in rank.running.reqs}
    names = [one.sequence_id for one in whole.sequences]
    assert own.keys() <= set(names), "a set runs nothing else"
    for name in names:
        if name in own:
            rank.ledger.resize(name, rank.ledger.whole_need(name))
            rows.append(own[name])
            assert partition(own[name], whole.ranks, "").before is Status.RUNNING
        else:
            owned = [one for other in whole.ranks for one in ranks[other].running.reqs if one.sequence_id == name]
            (original,) = (one for one in owned if not is_replica(one))
            pages = rank.replica_ledger.whole_pages(original)
            rank.replica_ledger.reserve(name, pages, whole=pages)
            replica = replace(original, status=Status.MIGRATING, arrival=rank.next_arrival(), prompt_group=None)
            advance(replica, Event.REPLICATE, "")
            rows.append(replica)
    rank.running.reqs[:] = rows


def end(rank: VirtualRank, number: int, running: Running) -> Running:
    """Drop the replicas of a rank. Its own sequences go on."""
    for one in [one for one in running.reqs if is_replica(one)]:
        migrate(one, Event.DEPART, "")
        running.reqs.remove(one)
        rank.replica_ledger.release(one.sequence_id)
    for one in running.reqs:
        partition(one, frozenset((number,)), "")
    return running


def prompt_replicas(ranks: Sequence[VirtualRank], whole: Partition, takes: Callable[[str], bool]) -> dict[int, Batch]:
    """Return the batches of the ranks that get a replica of a prompt, by rank; none if a rank refuses it."""
    (prompt,) = whole.sequences
    if not takes(prompt.sequence_id):
        return {}
    return {
        number: _prompt_replica(ranks[number], prompt)
        for number in whole.ranks
        if prompt.sequence_id not in ranks[number].queued
    }


def _prompt_replica(rank: VirtualRank, prompt: SequenceState) -> Batch:
    replica = replace(prompt, status=Status.MIGRATING, max_new_tokens=1, arrival=rank.next_arrival(), prompt_group=None)
    pages = rank.replica_ledger.whole_pages(replica)
    assert rank.replica_ledger.fits(pages), "a prompt is shared where all ranks have pages for it"
    assert rank.state(rank.running).free_request_slots, "and a request slot"
    assert not rank.ledger.has_waiting, "those that wait for pages come first"
    rank.replica_ledger.reserve(replica.sequence_id, pages, whole=pages)
    advance(replica, Event.REPLICATE, "")
    return Batch(decode=False, sequences=(replica,), rows=replica.prompt_tokens)


def check(ranks: Sequence[VirtualRank]) -> None:
    """Check that each set runs the same rows on all its ranks, with one owner each, and nothing else."""
    for number, rank in enumerate(ranks):
        members = set_of(rank.running)
        if not members:
            assert not num_replicas(rank.running)
            continue
        assert number in members
        assert not (rank.queued or rank.ready or rank.begun or rank.forked) or rank.has_arrivals
        rows = [one.sequence_id for one in rank.running.reqs]
        for other in members:
            assert [one.sequence_id for one in ranks[other].running.reqs] == rows, "the rows of a set are the same"
        for name in rows:
            owners = [
                other
                for other in members
                for one in ranks[other].running.reqs
                if one.sequence_id == name and not is_replica(one)
            ]
            assert len(owners) == 1, f"{name} is owned by {owners}"
