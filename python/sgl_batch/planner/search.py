"""Searches the plan with the least predicted time of a batch, among those that fit memory (BatchGen 5.4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from sgl_batch.core.admission_policy import make_admission
from sgl_batch.planner.candidate import EXCLUSIVE, RESIDENT, STREAMED, Candidate, plan_of
from sgl_batch.planner.candidates import EQUAL, Allowed, candidates
from sgl_batch.planner.cost_model import CostModel
from sgl_batch.planner.followed_run import Room, running_pages
from sgl_batch.planner.interval_choice import settle_interval
from sgl_batch.planner.layouts import ONE_GPU, Layout
from sgl_batch.planner.model_layers import MOE, ModelLayers
from sgl_batch.planner.pass_cost import Known, PassCost
from sgl_batch.planner.schedule import COARSE, FINE, Prediction, predict
from sgl_batch.planner.workload import Followed, Workload

_DECODE_KEPT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryMap:
    """What a candidate takes of the device in each phase, in bytes by use, and the room that is left for KV.

    `lacks`: why the candidate does not fit; empty where it does.
    """

    phases: Mapping[str, Mapping[str, int]]
    room: Room
    lacks: str = ""

    @property
    def taken(self) -> int:
        """Return the bytes beside KV in the phase that takes more."""
        return max((sum(uses.values()) for uses in self.phases.values()), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A candidate with its memory and its predicted run, both of one rank; `layout`: of all GPUs."""

    candidate: Candidate
    memory: MemoryMap
    prediction: Prediction
    layout: Layout = ONE_GPU

    @property
    def is_implemented(self) -> bool:
        """Return whether the engine can run it."""
        return self.candidate.is_implemented and self.layout.is_implemented


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a search found: those that fit, the best first, and why the best of the others did not fit.

    `not_implemented`: candidates that the engine cannot run and that would be faster, the best first. `layouts`: the
    best plan of each layout of the GPUs, or why it has none.
    """

    ranked: Sequence[Planned]
    not_implemented: Sequence[Planned]
    lacks: str
    tried: int
    layouts: Sequence[tuple[Layout, Planned | None, str]] = ()


MemoryOf = Callable[[Candidate], MemoryMap]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What predictions of candidates for one batch, model, profile and machine share.

    Attributes:
        batch: The batch.
        known: The times of passes so far.
        quick: Whether passes are told apart coarsely, and few sequences followed.
    """

    batch: Followed
    known: Known
    quick: bool = False


def search(
    workload: Workload,
    costs: CostModel,
    model: ModelLayers,
    allowed: Allowed,
    memory_of: MemoryOf,
    *,
    quick: bool = False,
) -> Outcome:
    """Predict every candidate that fits, and rank them by time.

    Prefill limits are chosen first, by the time of the prompts alone: the few best are tried with all decode limits.
    With `quick`, only the best of them are; the few best decode groups are then tried with the other limits.
    """
    among = list(candidates(workload, costs, model, allowed))
    predicted = partial(
        predict_candidate,
        workload=workload,
        costs=costs,
        model=model,
        allowed=allowed,
        shared=Shared(batch=Followed(workload), known={}, quick=quick),
    )
    each = running_pages(workload, allowed.page_size)
    found: list[Planned] = []
    lacks, lacking, tried = "", math.inf, 0
    for some in _rounds(among, found) if quick else [among]:
        for candidate in some:
            tried += 1
            memory = memory_of(candidate)
            if quick and found and _too_wide(candidate, memory.room, each):
                continue
            prediction = None if memory.lacks else predicted(candidate, memory=memory)
            if prediction is not None:
                found.append(Planned(candidate=candidate, memory=memory, prediction=prediction))
            elif memory.taken < lacking:
                lacks = memory.lacks or "a sequence of the workload does not fit into the pages of KV"
                lacking = memory.taken
    outcome = _outcome(found, lacks, tried)
    if not (allowed.intervals and outcome.ranked):
        return outcome
    best, *others = outcome.ranked
    candidate, prediction = settle_interval(
        best.candidate, best.prediction, partial(predicted, memory=best.memory), allowed.pinned
    )
    return replace(outcome, ranked=[replace(best, candidate=candidate, prediction=prediction), *others])


def _rounds(among: Sequence[Candidate], found: Sequence[Planned]) -> Iterator[list[Candidate]]:
    """Yield the candidates of a quick search in rounds; `found` has those of the rounds before when one begins.

    The first has one prefill limit and one sub-batch for each size and place of the decode group, the second all
    prefill limits for the best few of them, and the third all sub-batches for the best.
    """
    first: dict[object, Candidate] = {}
    for one in among:
        if _of_prefill(one) == _of_prefill(among[0]):
            first[_of_group(one)] = one  # the last one has the largest sub-batch
    yield list(first.values())
    best = sorted(found, key=_seconds)[:_DECODE_KEPT]
    kept = {_of_group(one.candidate) for one in best} or first.keys()
    tried = set(first.values())
    second = [one for one in among if one not in tried and _of_group(one) in kept and _is_like(one, first)]
    yield second
    tried.update(second)
    at_best = min(found, key=_seconds).candidate if found else among[0]
    same = _of_prefill(at_best), _of_group(at_best)
    yield [one for one in among if one not in tried and (_of_prefill(one), _of_group(one)) == same]


def _too_wide(candidate: Candidate, room: Room, each: float) -> bool:
    """Return whether pages lack for even half of the decode group, so that one of half its size runs as many.

    `each`: pages of a running sequence.
    """
    pages = room.store if candidate.kv == STREAMED else room.device
    return candidate.b_moe_decode * each > 2 * pages


def _is_like(one: Candidate, first: Mapping[object, Candidate]) -> bool:
    return one.b_attn_decode == first[_of_group(one)].b_attn_decode


def _of_prefill(candidate: Candidate) -> object:
    return candidate.b_attn_prefill, candidate.b_moe_prefill, candidate.accumulate, candidate.weights


def _of_group(candidate: Candidate) -> object:
    return candidate.b_moe_decode, candidate.kv


def _outcome(found: list[Planned], lacks: str, tried: int) -> Outcome:
    found.sort(key=_seconds)
    if not found:
        return Outcome(ranked=[], not_implemented=[], lacks=lacks, tried=tried)
    fastest_s = found[0].prediction.seconds
    equal = [one for one in found if one.prediction.seconds <= (1 + EQUAL) * fastest_s]
    best = min(equal, key=lambda one: (one.memory.taken, one.prediction.seconds))
    copying = [one for one in found if one.candidate.kv == STREAMED or one.candidate.weights != RESIDENT]
    others = sorted((_interleaved(one) for one in copying), key=_seconds)
    return Outcome(
        ranked=[best, *(one for one in found if one is not best)],
        not_implemented=[one for one in others if one.prediction.seconds < (1 - EQUAL) * fastest_s],
        lacks=lacks,
        tried=tried,
    )


def search_layouts(among: Sequence[Layout], search_one: Callable[[Layout], Outcome]) -> Outcome:
    """Search each layout of the GPUs, and take the least time of those that the engine can run.

    Of layouts whose best plans take equally long, the one with the fewest ranks is taken.
    """
    bests: list[tuple[Layout, Planned | None, str]] = []
    ranked: list[Planned] = []
    others: list[Planned] = []
    tried = 0
    for layout in among:
        outcome = search_one(layout)
        tried += outcome.tried
        placed = [replace(one, layout=layout) for one in outcome.ranked]
        bests.append((layout, placed[0] if placed else None, outcome.lacks))
        if layout.is_implemented:
            ranked += placed
            others += [replace(one, layout=layout) for one in outcome.not_implemented]
        else:
            others += placed
    if ranked:
        firsts = [first for layout, first, _ in bests if first is not None and layout.is_implemented]
        equal_s = (1 + EQUAL) * min(map(_seconds, firsts))
        best = min((one for one in firsts if _seconds(one) <= equal_s), key=lambda one: one.layout.ranks)
        ranked = [best, *sorted((one for one in ranked if one is not best), key=_seconds)]
        others = [one for one in others if _seconds(one) < (1 - EQUAL) * _seconds(best)]
    others.sort(key=_seconds)
    return Outcome(
        ranked=ranked,
        not_implemented=others,
        lacks=next((why for layout, _, why in reversed(bests) if why and layout.is_implemented), ""),
        tried=tried,
        layouts=bests,
    )


def _seconds(planned: Planned) -> float:
    return planned.prediction.seconds


def _interleaved(planned: Planned) -> Planned:
    """Return a plan of two groups by turns: one's copies hide behind the other's computation, as far as they fit.

    On a CPU, where copies take cores from computation, nothing hides.
    """
    prediction = planned.prediction
    return Planned(
        candidate=replace(planned.candidate, interleaved=True),
        memory=planned.memory,
        prediction=replace(prediction, seconds=prediction.seconds - prediction.hideable_s),
    )


def predict_candidate(
    candidate: Candidate,
    workload: Workload,
    costs: CostModel,
    model: ModelLayers,
    allowed: Allowed,
    memory: MemoryMap,
    *,
    shared: Shared | None = None,
) -> Prediction | None:
    """Predict one candidate's run with the plan that the engine would make of it; None where a sequence cannot fit."""
    shared = shared or Shared(batch=Followed(workload), known={})
    plan = plan_of(candidate, allowed.base, page_size=allowed.page_size, dense=MOE not in model.layers)
    cost = PassCost(costs, model, candidate, cores=allowed.cores, known=shared.known, coarse=shared.quick)
    admission = make_admission(
        allowed.base.schedule.admission, on_cpu=allowed.cores > 0, exclusive_store=candidate.kv == EXCLUSIVE
    )
    detail = COARSE if shared.quick else FINE
    return predict(shared.batch, plan, cost, memory.room, candidate.kv, admission=admission.name, detail=detail)
