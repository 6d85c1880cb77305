"""Owns builders of ranks at a boundary for the tests of decisions."""

from __future__ import annotations

from dataclasses import replace

from sequence_builders import plan, sequence

from sgl_batch.core.page_boundary import State
from sgl_batch.core.rank_state import Movable, RankState
from sgl_batch.core.sequence import SequenceState, Status

PLAN = plan(b_moe=8, boundary_tokens=4, refill_watermark=0.75, ready_target=12)


def movable(arrival: int, *, tokens: int = 10, pages: int = 2, status: Status = Status.READY) -> Movable:
    return Movable(sequence=sequence(arrival, status=status), tokens=tokens, pages=pages)


def running(count: int, first: int = 0, **fields) -> list[Movable]:
    return [movable(first + i, status=Status.RUNNING, **fields) for i in range(count)]


def rank(
    *,
    queued: list[SequenceState] | None = None,
    ready: list[Movable] | None = None,
    runs: list[Movable] | None = None,
    unmovable_ready: list[SequenceState] | None = None,
    unmovable_running: int = 0,
    free_pages: int = 1000,
    free_request_slots: int = 64,
    steps: int = 4,
) -> RankState:
    ready, runs = ready or [], runs or []
    state = State(
        queued=queued or [],
        ready=[*(unmovable_ready or []), *(item.sequence for item in ready)],
        running=len(runs) + unmovable_running,
        steps=steps,
        request_slots=64,
        free_request_slots=free_request_slots,
        filling=False,
    )
    return RankState(state=state, total_pages=1000, free_pages=free_pages, ready=ready, running=runs)


def in_set(state: RankState, ranks: set[int], replicas: int) -> RankState:
    """Return a rank that is partitioned with others, with so many replicas beside its own running sequences."""
    runs = [replace(item, sequence=replace(item.sequence, ranks=frozenset(ranks))) for item in state.running]
    with_replicas = replace(state.state, running=state.state.running + replicas)
    return replace(state, state=with_replicas, running=runs, partition=frozenset(ranks), replicas=replicas)
