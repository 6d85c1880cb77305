"""Decides for a group of ranks: the phase that all run next, each rank's part in it, and which sequences migrate.

The ranks run their steps together, so that they always call the same collectives. Decisions are pure and made of those
for one rank in `page_boundary`. managers/rank_group gathers the states and sends each rank its actions.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sgl_batch.core.actions import (
    Actions,
    EndPartition,
    Hold,
    Idle,
    Migrate,
    Partition,
    Prefill,
    PrefillPhase,
    Refill,
)
from sgl_batch.core.admission import unit_pages
from sgl_batch.core.early_copies import EarlyCopy
from sgl_batch.core.ended_lengths import EndedLengths
from sgl_batch.core.group_callbacks import BUILT_IN, CallbackFault, Callbacks
from sgl_batch.core.group_view import GroupView
from sgl_batch.core.node_pool import Pooled, pooled, with_leases
from sgl_batch.core.page_boundary import BoundaryAction, State, decide_at_boundary, prefill_units
from sgl_batch.core.partition import anything_waits, at_every_other_boundary, ends_of, without_replicas
from sgl_batch.core.partition_costs import PartitionCosts
from sgl_batch.core.plan import Plan, num_expert_calls
from sgl_batch.core.prompt_partition import shared_prompt
from sgl_batch.core.rank_moves import Migration, Move, as_migrates, in_phases, moves_of, plan_moves, with_moves
from sgl_batch.core.rank_state import RankState, movable_by_name
from sgl_batch.core.sequence import SequenceState, Status
from sgl_batch.core.store_lease import Lease

# How many queued sequences a rank sends at a boundary: enough for any prefill group, and few of a queue of millions.
MOST_QUEUED = 2048


class StepKind(enum.Enum):
    """What all ranks do next. FORKS: they prefill the choices whose leader has just computed their prompt."""

    IDLE = "idle"
    DECODE = "decode"
    BOUNDARY = "boundary"
    FORKS = "forks"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHeader:
    """What a rank sends before each step: how many of its sequences run, wait, and wait as forks.

    `due`: whether this rank by itself would have a boundary now. `plan_changes`: how many changes (of the plan, of
    weights, pauses) have reached it since start. All ranks get the same changes, but not at the same moment.
    """

    running: int
    waiting: int
    forked: int
    due: bool
    plan_changes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStep:
    """One step of all ranks.

    expert_calls: how many expert calls a layer takes, on every rank.
    plan_changes: how many changes are in force from the next step on, because they have reached all ranks.
    any_rank_decodes: whether any rank has sequences to decode; a rank that waits for copies would hold them up.
    """

    kind: StepKind
    expert_calls: int = 1
    plan_changes: int = 0
    any_rank_decodes: bool = False


def next_step(headers: Sequence[RankHeader], plan: Plan) -> GroupStep:
    """Return the step that all ranks take under `plan`, which is in force on all of them."""
    known = min(header.plan_changes for header in headers)
    runs = any(header.running for header in headers)
    return replace(_next_step(headers, plan), plan_changes=known, any_rank_decodes=runs)


def _next_step(headers: Sequence[RankHeader], plan: Plan) -> GroupStep:
    """If a rank has waiting sequences and no rank runs any, a boundary comes, due or not."""
    forked = max(header.forked for header in headers)
    if forked:
        rows = min(forked, plan.prefill.b_moe)
        return GroupStep(kind=StepKind.FORKS, expert_calls=num_expert_calls(rows, plan.prefill))
    running = max(header.running for header in headers)
    waiting = any(header.waiting for header in headers)
    if any(header.due for header in headers) or (waiting and not running):
        return GroupStep(kind=StepKind.BOUNDARY)
    if running:
        return GroupStep(kind=StepKind.DECODE, expert_calls=num_expert_calls(running, plan.decode))
    return GroupStep(kind=StepKind.IDLE)


def rank_is_due(state: State, plan: Plan) -> bool:
    """Return whether a rank wants a boundary now. Unlike a single rank, one without runners may wait for the others."""
    if state.urgent or state.steps >= plan.boundary_tokens:
        return state.running > 0
    waiting = len(state.ready) + len(state.queued)
    if not (state.changed and waiting):
        return False
    return state.running * 2 <= plan.decode.b_moe and waiting >= state.running


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDecision:
    """What all ranks do at a boundary.

    actions: by rank, its actions in order: every EndPartition, Migrate, Partition and Hold of the group, then the
        rank's own action.
    busy: whether any rank has rows to compute.
    prefill: whether the ranks prefill.
    expert_calls: how many expert calls a layer takes in the next pass, on every rank.
    fault: what was wrong with the answer of a user's callback, instead of which the default has decided.
    leases: by rank, its lease of the store that the ranks share, in force before its actions; empty without one.
    moves: the moves of all ranks, one for each sequence of the Migrate actions.
    copies: copies that begin now, for moves at a later boundary. Ranks drop the copies that they hold, if all of their
        pages have arrived and the sequence does not move now, unless the ranks prefill.
    """

    actions: tuple[Actions, ...]
    busy: bool
    prefill: bool
    expert_calls: int
    fault: CallbackFault | None = None
    leases: tuple[Lease, ...] = ()
    moves: tuple[Move, ...] = ()
    copies: tuple[EarlyCopy, ...] = ()

    @property
    def ends(self) -> tuple[EndPartition, ...]:
        """The partitions that end, before anything else is done."""
        return tuple(action for action in self.actions[0] if isinstance(action, EndPartition))

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """The partitions that begin: of running sequences or, in a prefill phase, of the prompt that all share."""
        return tuple(action for action in self.actions[0] if isinstance(action, Partition))

    @property
    def held(self) -> frozenset[int]:
        """The ranks that decode nothing until the next boundary."""
        return held_by(self.actions[0])


def decide_group(
    ranks: Sequence[RankState],
    plan: Plan,
    migration: Migration,
    callbacks: Callbacks = BUILT_IN,
    ended: EndedLengths | None = None,
    costs: PartitionCosts | None = None,
) -> GroupDecision:
    """Return what every rank does at a boundary.

    All ranks prefill or all decode: a rank without work takes part with no rows, because exchanges include all ranks.

    Args:
        ranks: the state of each rank, by rank, as gathered at this boundary.
        plan: the plan in force on all ranks.
        migration: which sequences may change their rank. No callback is asked with those that are for tests.
        callbacks: what decides.
        ended: lengths of the outputs that have ended on all ranks; None if none is known.
        costs: measured seconds of passes that ranks share; None if they are not known.
    """
    ranks, leases = with_leases(ranks, plan)
    if migration.is_for_tests:
        return replace(_for_tests(ranks, plan, migration), leases=leases)
    ends = ends_of(ranks) if anything_waits(ranks) else ()
    ranks = without_replicas(ranks, ends)
    pool = pooled(ranks, plan) if migration is Migration.EVEN else Pooled(ranks=ranks)
    # Where ranks prefill, nothing moves: what waits counts as dealt, but accounts are those without the moves.
    dealt = [replace(rank, state=after.state) for rank, after in zip(ranks, pool.ranks, strict=True)]
    own = [_at_boundary(rank, plan) for rank in dealt]
    prefills = {n: _head_pages(one, dealt[n], plan) for n, one in enumerate(own) if isinstance(one, Prefill)}
    view = _view(ranks, pool, prefills, plan, migration, ended)
    actions, fault = callbacks.decide(view if costs is None else replace(view, costs=costs.long_tail(view)))
    if any(isinstance(action, PrefillPhase) for action in actions):
        decision = _prefill_phase(dealt, own, plan, ends, costs)
    else:
        decision = _decode_phase(ranks, plan, (*ends, *actions), migration, view.evening)
    return replace(decision, fault=fault, leases=leases)


def _for_tests(ranks: Sequence[RankState], plan: Plan, migration: Migration) -> GroupDecision:
    """Move or partition all that can be, at a boundary without prefill."""
    ends = ends_of(ranks) if migration is Migration.PARTITION or anything_waits(ranks) else ()
    partitions = at_every_other_boundary(ranks, plan) if migration is Migration.PARTITION and not ends else ()
    ranks = without_replicas(ranks, ends)
    own = [_at_boundary(rank, plan) for rank in ranks]
    if any(isinstance(action, Prefill) for action in own):
        return _prefill_phase(ranks, own, plan, ends)
    moves = as_migrates(ranks, plan_moves(ranks, plan, migration))
    return _decode_phase(ranks, plan, (*ends, *moves, *partitions), migration)


def _view(
    ranks: Sequence[RankState],
    pool: Pooled,
    prefills: Mapping[int, int],
    plan: Plan,
    migration: Migration,
    ended: EndedLengths | None,
) -> GroupView:
    return GroupView(
        ranks=tuple(ranks),
        plan=plan,
        ended=EndedLengths() if ended is None else ended,
        prefills=prefills,
        pooled=as_migrates(ranks, pool.moves),
        evening=() if prefills or not pool.all_run else as_migrates(ranks, plan_moves(pool.ranks, plan, migration)),
        migrates=migration is not Migration.NEVER,
    )


def _head_pages(action: Prefill, rank: RankState, plan: Plan) -> int:
    """Return the pages that the first prompt of a prefill reserves."""
    return unit_pages(action.units[0], rank.ledger(plan.page_size), plan) if action.units else 0


def _decode_phase(
    ranks: Sequence[RankState], plan: Plan, wanted: Actions, migration: Migration, evening: Sequence[Migrate] = ()
) -> GroupDecision:
    """Return the decision that these actions are carried out, and that the ranks then refill and decode.

    Some of the moves that are `wanted` are only prepared now. `evening`: those that even out counts.
    """
    moves, copies = in_phases(ranks, moves_of(wanted), plan, migration, evening)
    actions = with_moves(wanted, as_migrates(ranks, moves))
    held = held_by(actions)
    ranks = without_replicas(ranks, (action for action in actions if isinstance(action, EndPartition)))
    decoding = _decoding(ranks, moves)
    own = [Idle() if number in held else _at_boundary(rank, plan) for number, rank in enumerate(decoding)]
    decoded = [
        0 if number in held else _decode_rows(rank, action)
        for number, (rank, action) in enumerate(zip(decoding, own, strict=True))
    ]
    rows = max(decoded)
    # A move may fail; its source then has more rows than planned here, up to a whole group.
    most = max(rows, plan.decode.b_moe, *(rank.state.running for rank in ranks)) if moves else rows
    calls = num_expert_calls(most, plan.decode)
    lists: tuple[Actions, ...] = tuple((*actions, action) for action in own)
    return GroupDecision(actions=lists, busy=rows > 0, prefill=False, expert_calls=calls, moves=moves, copies=copies)


def held_by(actions: Actions) -> frozenset[int]:
    """Return the ranks that decode nothing until the next boundary."""
    return frozenset[int]().union(*(action.ranks for action in actions if isinstance(action, Hold)))


def _at_boundary(rank: RankState, plan: Plan) -> BoundaryAction:
    return decide_at_boundary(rank.state, plan, rank.ledger(plan.page_size), rank.capacity)


def _decode_rows(rank: RankState, action: BoundaryAction) -> int:
    return rank.state.running + (len(action.sequences) if isinstance(action, Refill) else 0)


def _prefill_phase(
    ranks: Sequence[RankState],
    actions: list[BoundaryAction],
    plan: Plan,
    ends: tuple[EndPartition, ...],
    costs: PartitionCosts | None = None,
) -> GroupDecision:
    """Let ranks that could decode on prefill too, as far as they have room, instead of waiting for those that must."""
    parts: list[BoundaryAction] = []
    for rank, action in zip(ranks, actions, strict=True):
        units = action.units if isinstance(action, Prefill) else ()
        if not units:
            filling = replace(rank.state, filling=True)
            units = tuple(prefill_units(filling, plan, rank.ledger(plan.page_size), rank.capacity))
        rest = rank.state.rest
        parts.append(Prefill(units=units, rest=rest) if units or rest else Idle())
    rows = max(_prefill_rows(part) for part in parts)
    calls = num_expert_calls(rows, plan.prefill)
    same: Actions = (*ends, *shared_prompt(ranks, parts, plan, costs))
    return GroupDecision(actions=tuple((*same, part) for part in parts), busy=True, prefill=True, expert_calls=calls)


def _prefill_rows(action: BoundaryAction) -> int:
    if not isinstance(action, Prefill):
        return 0
    return sum(unit.leader.prefill_rows for unit in action.units) + (action.rest.tokens if action.rest else 0)


def _decoding(ranks: Sequence[RankState], moves: Sequence[Move]) -> list[RankState]:
    """Return the states of the ranks after the moves, without their queues.

    With room that the moves have made, a rank might prefill; that is decided at the next boundary.
    """
    decoding = [replace(rank, state=replace(rank.state, queued=(), begun=None)) for rank in ranks]
    for move in moves:
        moving = movable_by_name(ranks[move.source])[move.sequence_id].sequence
        if moving.status is not Status.QUEUED:
            source = decoding[move.source]
            decoding[move.source] = replace(source, state=_without(source.state, moving))
        if not move.as_tokens:
            target = decoding[move.target]
            decoding[move.target] = replace(target, state=replace(target.state, ready=[*target.state.ready, moving]))
    return decoding


def _without(state: State, leaving: SequenceState) -> State:
    ready = [sequence for sequence in state.ready if sequence.sequence_id != leaving.sequence_id]
    was_ready = len(ready) < len(state.ready)
    return replace(state, ready=ready, running=state.running - (not was_ready))
