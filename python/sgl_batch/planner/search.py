"""Searches the plan with the least predicted time of a batch, among those that fit memory (BatchGen 5.4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sgl_batch.config import BatchConfig, from_mapping
from sgl_batch.core.plan import make_plan
from sgl_batch.planner.candidate import DEVICE, EXCLUSIVE, INCLUSIVE, RESIDENT, STREAMED, Candidate
from sgl_batch.planner.cost_model import CostModel
from sgl_batch.planner.layouts import ONE_GPU, Layout
from sgl_batch.planner.model_layers import MOE, ModelLayers
from sgl_batch.planner.pass_cost import PassCost
from sgl_batch.planner.schedule import Prediction, Room, predict
from sgl_batch.planner.workload import Workload

_SUB_BATCH_TOKENS = (256, 512, 1024, 2048, 4096)
_GROUP_TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
_GROUP_ROWS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_SUB_BATCH_ROWS = (64, 256)
_PREFILL_KEPT = 3
# Predictions that are closer than this are equal: the plan that takes less memory is taken.
_EQUAL = 0.005


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
class Allowed:
    """What the search may choose. `most_running`: sequences of the largest decode group; `base`: all other settings."""

    kv: Sequence[str] = (DEVICE,)
    weights: Sequence[str] = (RESIDENT,)
    most_running: int = max(_GROUP_ROWS)
    page_size: int = 64
    cores: int = 0
    base: BatchConfig = field(default_factory=BatchConfig)


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


def search(workload: Workload, costs: CostModel, model: ModelLayers, allowed: Allowed, memory_of: MemoryOf) -> Outcome:
    """Predict every candidate that fits, and rank them by time.

    Prefill limits are chosen first, by the time of the prompts alone: the few best are tried with all decode limits.
    """
    found: list[Planned] = []
    lacks, lacking, tried = "", math.inf, 0
    for candidate in _candidates(workload, costs, model, allowed):
        tried += 1
        memory = memory_of(candidate)
        prediction = None if memory.lacks else predict_candidate(candidate, workload, costs, model, allowed, memory)
        if prediction is None:
            if memory.taken < lacking:
                lacks, lacking = (
                    memory.lacks or "a sequence of the workload does not fit into the pages of KV",
                    memory.taken,
                )
            continue
        found.append(Planned(candidate=candidate, memory=memory, prediction=prediction))
    found.sort(key=_seconds)
    if not found:
        return Outcome(ranked=[], not_implemented=[], lacks=lacks, tried=tried)
    fastest_s = found[0].prediction.seconds
    equal = [one for one in found if one.prediction.seconds <= (1 + _EQUAL) * fastest_s]
    best = min(equal, key=lambda one: (one.memory.taken, one.prediction.seconds))
    copying = [one for one in found if one.candidate.kv == STREAMED or one.candidate.weights != RESIDENT]
    others = sorted((_interleaved(one) for one in copying), key=_seconds)
    return Outcome(
        ranked=[best, *(one for one in found if one is not best)],
        not_implemented=[one for one in others if one.prediction.seconds < (1 - _EQUAL) * fastest_s],
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
        equal_s = (1 + _EQUAL) * min(map(_seconds, firsts))
        best = min((one for one in firsts if _seconds(one) <= equal_s), key=lambda one: one.layout.ranks)
        ranked = [best, *sorted((one for one in ranked if one is not best), key=_seconds)]
        others = [one for one in others if _seconds(one) < (1 - _EQUAL) * _seconds(best)]
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
) -> Prediction | None:
    """Predict one candidate's run with the plan that the engine would make of it; None where a sequence cannot fit."""
    settings = {name: value for name, value in candidate.settings.items() if name not in ("decode_kv", "weights")}
    config = from_mapping({**allowed.base.flat(), **settings})
    dense = MOE not in model.layers
    plan = make_plan(config, page_size=allowed.page_size, max_running=2 * candidate.b_moe_decode, dense=dense)
    cost = PassCost(costs, model, candidate, cores=allowed.cores)
    return predict(workload, plan, cost, memory.room, candidate.kv)


def _candidates(workload: Workload, costs: CostModel, model: ModelLayers, allowed: Allowed) -> Iterator[Candidate]:
    rows = [size for size in _GROUP_ROWS if size <= allowed.most_running]
    # A group larger than the batch is the batch.
    rows = [size for index, size in enumerate(rows) if index == 0 or rows[index - 1] < workload.count]
    kinds = (None, False) if MOE in model.layers else (None, True, False)
    for weights in allowed.weights:
        for accumulate in kinds:
            prefill = _prefill_limits(workload, costs, model, allowed, weights=weights, accumulate=accumulate)
            for b_attn_prefill, b_moe_prefill in prefill:
                for kv in allowed.kv:
                    for b_moe in rows:
                        for b_attn in sorted({min(size, b_moe) for size in (*_SUB_BATCH_ROWS, b_moe)}):
                            yield Candidate(
                                b_attn_prefill=b_attn_prefill,
                                b_moe_prefill=b_moe_prefill,
                                b_attn_decode=b_attn,
                                b_moe_decode=b_moe,
                                accumulate=accumulate,
                                kv=kv,
                                weights=weights,
                            )


def _prefill_limits(
    workload: Workload,
    costs: CostModel,
    model: ModelLayers,
    allowed: Allowed,
    *,
    weights: str,
    accumulate: bool | None,
) -> list[tuple[int, int]]:
    """Return the limits with the fastest prefill by token, and the smallest ones, which leave the most memory."""
    timed: list[tuple[float, tuple[int, int]]] = []
    prompts = [request.prompt for request in workload.requests[: _GROUP_TOKENS[-1]]]
    for b_moe in _GROUP_TOKENS:
        group: list[int] = []
        tokens = 0
        for prompt in prompts:
            if group and tokens + prompt > b_moe:
                break
            group.append(prompt)
            tokens += prompt
        for b_attn in (size for size in _SUB_BATCH_TOKENS if size <= b_moe):
            candidate = Candidate(
                b_attn_prefill=b_attn,
                b_moe_prefill=b_moe,
                b_attn_decode=1,
                b_moe_decode=1,
                accumulate=accumulate,
                weights=weights,
            )
            seconds = PassCost(costs, model, candidate, cores=allowed.cores).prefill(group).seconds / tokens
            timed.append((seconds, (b_attn, b_moe)))
    fastest = min(seconds for seconds, _ in timed)
    # Of limits that are as fast, the smaller ones.
    near = sorted((limits[1], limits[0]) for seconds, limits in timed if seconds <= fastest * (1 + _EQUAL))
    ordered = [(b_attn, b_moe) for b_moe, b_attn in near] + [limits for _, limits in sorted(timed)]
    return list(dict.fromkeys([*ordered[:_PREFILL_KEPT], (_SUB_BATCH_TOKENS[0], _GROUP_TOKENS[0])]))


def kv_forms(*, store_bytes: int, mode: str) -> tuple[str, ...]:
    """Return where KV may lie with a host store of so many bytes and the mode that was asked for."""
    if not store_bytes:
        return (DEVICE,)
    stores = (INCLUSIVE, EXCLUSIVE) if mode == "auto" else (mode,)
    return (*stores, STREAMED)
