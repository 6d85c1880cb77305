"""Searches the plan with the least predicted time of a batch, among those that fit memory (BatchGen 5.4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sgl_batch.config import from_mapping
from sgl_batch.core.plan import make_plan
from sgl_batch.planner.candidate import RESIDENT, STREAMED, Candidate
from sgl_batch.planner.candidates import EQUAL, Allowed, candidates
from sgl_batch.planner.cost_model import CostModel
from sgl_batch.planner.layouts import ONE_GPU, Layout
from sgl_batch.planner.model_layers import MOE, ModelLayers
from sgl_batch.planner.pass_cost import Known, PassCost
from sgl_batch.planner.schedule import Prediction, Room, predict
from sgl_batch.planner.workload import Workload

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
    With `quick`, only the best of them are; the few best decode limits are then tried with the other prefill limits.
    """
    among = list(candidates(workload, costs, model, allowed))
    known: Known = {}
    found: list[Planned] = []
    lacks, lacking, tried = "", math.inf, 0
    for some in _rounds(among, found) if quick else [among]:
        for candidate in some:
            tried += 1
            memory = memory_of(candidate)
            prediction = (
                None
                if memory.lacks
                else predict_candidate(candidate, workload, costs, model, allowed, memory, known=known)
            )
            if prediction is not None:
                found.append(Planned(candidate=candidate, memory=memory, prediction=prediction))
            elif memory.taken < lacking:
                lacks = memory.lacks or "a sequence of the workload does not fit into the pages of KV"
                lacking = memory.taken
    return _outcome(found, lacks, tried)


def _rounds(among: Sequence[Candidate], found: Sequence[Planned]) -> Iterator[list[Candidate]]:
    """Yield the candidates of a quick search in two rounds; `found` has those of the first when the second begins."""
    yield [one for one in among if _of_prefill(one) == _of_prefill(among[0])]
    best = sorted(found, key=_seconds)[:_DECODE_KEPT]
    kept = {_of_decode(one.candidate) for one in best} or {_of_decode(one) for one in among}
    yield [one for one in among if _of_prefill(one) != _of_prefill(among[0]) and _of_decode(one) in kept]


def _of_prefill(candidate: Candidate) -> object:
    return candidate.b_attn_prefill, candidate.b_moe_prefill, candidate.accumulate, candidate.weights


def _of_decode(candidate: Candidate) -> object:
    return candidate.b_attn_decode, candidate.b_moe_decode, candidate.kv


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
    known: Known | None = None,
) -> Prediction | None:
    """Predict one candidate's run with the plan that the engine would make of it; None where a sequence cannot fit.

    `known`: the times of passes so far, of other candidates of the same model, profile and machine.
    """
    settings = {name: value for name, value in candidate.settings.items() if name not in ("decode_kv", "weights")}
    config = from_mapping({**allowed.base.flat(), **settings})
    dense = MOE not in model.layers
    plan = make_plan(config, page_size=allowed.page_size, max_running=2 * candidate.b_moe_decode, dense=dense)
    cost = PassCost(costs, model, candidate, cores=allowed.cores, known=known)
    return predict(workload, plan, cost, memory.room, candidate.kv)
