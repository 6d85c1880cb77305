"""Decides with which sizes an engine starts: the planner's winner where a profile holds, else the engine's defaults.

Pure: plan_inputs reads the model, the machine and the profile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from sgl_batch.config import BatchConfig, from_mapping
from sgl_batch.core.page_ledger import pages_for
from sgl_batch.core.plan import B_ATTN_DECODE
from sgl_batch.planner.candidate import INCLUSIVE, RESIDENT, STREAMED, Candidate
from sgl_batch.planner.candidates import Allowed, kv_forms
from sgl_batch.planner.cost_model import fit
from sgl_batch.planner.model_layers import ModelLayers
from sgl_batch.planner.refinement import INTERVAL, PlanBasis, limits_with_memory
from sgl_batch.planner.samples import Profile
from sgl_batch.planner.schedule import Prediction
from sgl_batch.planner.search import MemoryMap, MemoryOf, predict_candidate, search
from sgl_batch.planner.workload import Workload, parse_workload

_LIMITS = ("b_attn_prefill", "b_moe_prefill", "b_attn_decode", "b_moe_decode", "accumulate")
_SCHEDULE = ("boundary_tokens", "ready_ahead")
SETTLED = (*_LIMITS, *_SCHEDULE, "decode_kv", "kv_store_mode")
Predict = Callable[[Workload], Prediction | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """What a plan is made from.

    Attributes:
        profile: Of this machine and model.
        layers: The model's numbers.
        memory_of: Counts what a candidate takes of memory.
        page_size: Tokens of a page.
        longest: Tokens of the longest sequence that the engine takes.
        most_running: Sequences that may run at once, where the user limits them.
        again: The command that makes the profile again.
    """

    profile: Profile
    layers: ModelLayers
    memory_of: MemoryOf
    page_size: int
    longest: int
    most_running: int | None = None
    again: str = "sgl-batch plan --profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan:
    """The configuration with which an engine starts, and where its sizes are from.

    Attributes:
        config: The configuration, with the sizes that were chosen.
        source: Where the sizes are from, as a line for the user that begins behind "plan: ".
        chosen: What the planner chose, by the names of `BatchConfig`; nothing without a profile.
        workload: For what it was chosen.
        prediction: Of that workload; None without a profile.
        predict: Predicts a run of another workload in this configuration; None without a profile.
        again: The command that makes the profile again.
        basis: What a refinement during the run is made from; None without a profile.
    """

    config: BatchConfig
    source: str
    chosen: Mapping[str, object] = field(default_factory=dict)
    workload: Workload | None = None
    prediction: Prediction | None = None
    predict: Predict | None = None
    again: str = ""
    basis: PlanBasis | None = None

    def as_dict(self) -> dict[str, object]:
        """Return it as JSON for a manifest, without the configuration."""
        message: dict[str, object] = {"source": self.source, "chosen": dict(self.chosen)}
        if self.workload is not None and self.prediction is not None:
            prompts, outputs = self.workload.tokens
            message["workload"] = {
                "source": self.workload.source,
                "requests": self.workload.count,
                "prompt_tokens": prompts,
                "output_tokens": outputs,
            }
            message["predicted"] = self.prediction.as_dict()
            message["profile_again"] = self.again
        return message


def asked_workload(config: BatchConfig) -> Workload | None:
    """Return the batch of --workload, or None without one. Raises ConfigError for what cannot be read."""
    text = config.schedule.workload
    return None if text is None else replace(parse_workload(text), source=f"--workload {text}")


def conservative(config: BatchConfig, why: str) -> StartPlan:
    """Return the plan without a prediction: the defaults, and what the user gave. `why`: there is no better one."""
    return StartPlan(config=config, source=f"conservative defaults ({why})")


def choose(config: BatchConfig, given: Collection[str], found: PlanInputs, workload: Workload) -> StartPlan:
    """Return the plan with the least predicted time among those that have all settings that the user gave.

    Args:
        config: The configuration, with defaults for what was not given.
        given: The names of the user's settings.
        found: What the plan is made from.
        workload: The batch.

    Raises:
        ConfigError: The profile lacks what a prediction needs.
    """
    allowed, costs = _allowed(config, given, found), fit(found.profile, found.layers)
    if config.memory.weights != RESIDENT and "disk" not in found.profile.rates:
        why = f"the profile has no rate of reading the checkpoint; {found.again} --weights streamed measures it"
        return conservative(config, why)
    outcome = search(workload, costs, found.layers, allowed, _refusing_no_more(config, allowed, found), quick=True)
    if not outcome.ranked:
        return conservative(config, f"no plan fits: {outcome.lacks}")
    best = outcome.ranked[0]
    settings = best.candidate.settings
    chosen = {name: settings[name] for name in SETTLED if name in settings and name not in given}
    settled = from_mapping({**config.flat(), **chosen})
    predict = partial(
        predict_candidate, best.candidate, costs=costs, model=found.layers, allowed=allowed, memory=best.memory
    )
    prediction = predict(workload)
    assert prediction is not None, "a quick search has followed it to its end"
    source = (
        f"measured profile of {found.profile.made[:10]}: {_shown(chosen)}; predicted "
        f"{prediction.seconds:,.1f} s for {workload.count:,} requests ({workload.source})"
    )
    return StartPlan(
        config=settled,
        source=source,
        chosen=chosen,
        workload=workload,
        prediction=prediction,
        predict=predict,
        again=found.again,
        basis=PlanBasis(
            candidate=replace(best.candidate, boundary_tokens=None, ready_ahead=None),
            costs=costs,
            model=found.layers,
            allowed=replace(allowed, base=settled, intervals=False),
            memory=best.memory,
            memory_of=found.memory_of,
            workload=workload,
            fixed_interval=INTERVAL in given,
            most=limits_with_memory(best.candidate, reserved=config.memory.device_memory > 0),
        ),
    )


def _allowed(config: BatchConfig, given: Collection[str], found: PlanInputs) -> Allowed:
    memory, flat = config.memory, config.flat()
    allowed = Allowed(
        kv=kv_forms(store_bytes=memory.kv_store_bytes, mode=memory.kv_store_mode, decode_kv=memory.decode_kv),
        weights=(memory.weights,),
        page_size=found.page_size,
        cores=int(found.profile.machine["cores"]),
        base=config,
        pinned={name: flat[name] for name in (*_LIMITS, *_SCHEDULE) if name in given},
        intervals=True,
    )
    return allowed if found.most_running is None else replace(allowed, most_running=found.most_running)


def _refusing_no_more(config: BatchConfig, allowed: Allowed, found: PlanInputs) -> MemoryOf:
    """Return `memory_of` without candidates that could refuse a sequence that the defaults take.

    A batch may have longer sequences than were planned for. An inclusive store that is not larger than the device's
    pages holds fewer tokens than the exclusive one, which the engine would take by itself.
    """
    forward = config.forward
    default = found.memory_of(
        Candidate(
            b_attn_prefill=min(forward.b_attn_prefill, forward.b_moe_prefill),
            b_moe_prefill=forward.b_moe_prefill,
            b_attn_decode=min(forward.b_attn_decode or B_ATTN_DECODE, forward.b_moe_decode),
            b_moe_decode=forward.b_moe_decode,
            kv=allowed.kv[0],
            weights=allowed.weights[0],
        )
    )
    least = min(default.room.device, pages_for(found.longest, found.page_size))
    is_open = config.memory.kv_store_mode == "auto" and config.memory.decode_kv != STREAMED

    def memory_of(candidate: Candidate) -> MemoryMap:
        memory = found.memory_of(candidate)
        room, lacks = memory.room, ""
        if room.device < least:
            lacks = f"{room.device:,} pages of KV are left, and the longest sequence takes {least:,}"
        elif is_open and candidate.kv in (INCLUSIVE, STREAMED) and room.store <= room.device:
            lacks = "the host KV store is not larger than the device's pages"
        return replace(memory, lacks=memory.lacks or lacks)

    return memory_of


def _shown(chosen: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in chosen.items()) or "all sizes are given"
