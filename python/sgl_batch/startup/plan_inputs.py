"""Reads what an engine's plan is made from, and plans with it. No fault of planning keeps an engine from starting.

start_plan decides.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

from sgl_batch.config import BatchConfig
from sgl_batch.core.model_numbers import number
from sgl_batch.core.plan_rates import PlanRates
from sgl_batch.core.supported_models import CPU
from sgl_batch.errors import ConfigError
from sgl_batch.memory.free_memory import free_bytes, machine_bytes
from sgl_batch.planner.candidate import Candidate
from sgl_batch.planner.candidate_memory import CandidateMemory, remembered
from sgl_batch.planner.needs import Target
from sgl_batch.planner.samples import Profile
from sgl_batch.planner.schedule import Prediction
from sgl_batch.planner.search import MemoryMap, MemoryOf
from sgl_batch.planner.workload import DEFAULT, Request, Workload, parse_workload, within_context
from sgl_batch.startup.fit_checks import CONTEXT_FIELDS
from sgl_batch.startup.kept_profile import profile_that_holds
from sgl_batch.startup.planned_model import PlannedModel, read_model
from sgl_batch.startup.start_plan import PlanInputs, StartPlan, asked_workload, choose, conservative

logger = logging.getLogger(__name__)

# What an engine needs beside the planner's estimate: a plan must not be refused by the budget that it was made for.
_SURE_SHARE = 0.9
# SGLang gives weights and KV half of a CPU machine's memory where no budget is given.
CPU_SHARE = 0.5
PAGE_SIZE = 64
# Rates are of a batch of so many decode groups, in which beginning and end count little; a step, of so many.
_RATE_GROUPS, _RATE_STEPS = 4, 32
_RANKS = ("dp_size", "tp_size", "ep_size", "pp_size")
_OTHER_MODEL = ("json_model_override_args", "quantization")
_FAULTS = (ArithmeticError, AssertionError, LookupError, OSError, RuntimeError, TypeError, ValueError)


def plan_start(
    config: BatchConfig,
    given: Collection[str],
    arguments: Mapping[str, object],
    workload: Callable[[Path | None], Workload | None] = lambda _: None,
    *,
    on_cpu: bool,
) -> StartPlan:
    """Return the plan with which an engine starts.

    Args:
        config: The configuration, with defaults for what the user did not give.
        given: The names of the settings that the user gave; they stay.
        arguments: SGLang's arguments, as far as they were given.
        workload: Returns the batch, where it is known; it gets the directory of the tokenizer, where that is here.
            --workload comes before it, and the planner's default behind it.
        on_cpu: Whether the engine computes on a CPU.

    Raises:
        ConfigError: --workload cannot be read.
    """
    asked = asked_workload(config)
    try:
        why_none = _obstacle(config, arguments, on_cpu=on_cpu)
        if why_none is not None:
            return conservative(config, why_none)
        name, revision = str(arguments.get("model_path")), arguments.get("revision")
        model = read_model(
            name,
            dtype=str(arguments.get("dtype") or "auto"),
            weight_dtype=config.forward.cpu_weight_dtype,
            revision=None if revision is None else str(revision),
        )
        again = f"sgl-batch plan --model {shlex.quote(name)} --profile"
        profile = _profile(model, again)
        tokenizer = Path(str(arguments.get("tokenizer_path") or model.directory))
        known = asked or workload(tokenizer if tokenizer.is_dir() else None)
        batch = known or replace(parse_workload(DEFAULT), source=f"by default, {DEFAULT}")
        batch = within_context(batch, _context(model, arguments))
        return choose(config, given, _inputs(config, arguments, model, profile, batch, again), batch)
    except ConfigError as error:
        return conservative(config, str(error))
    except _FAULTS as error:
        logger.debug("planning failed", exc_info=True)
        text = (str(error).splitlines() or [""])[0]
        return conservative(config, f"planning failed: {type(error).__name__}: {text}")


def predicted(plan: StartPlan, workload: Workload) -> Prediction | None:
    """Return the predicted run of a batch with the sizes of `plan`; None without a profile, or where planning fails."""
    try:
        return None if plan.predict is None else plan.predict(workload)
    except (ConfigError, *_FAULTS):
        logger.debug("the prediction failed", exc_info=True)
        return None


def plan_rates(plan: StartPlan) -> PlanRates | None:
    """Return what `plan` predicts for any batch, from two predictions; None without a profile.

    The rates are of requests as those for which it was planned, as many as fill its groups.
    """
    workload = plan.workload
    if workload is None:
        return None
    count = max(workload.count, _RATE_GROUPS * plan.config.forward.b_moe_decode)
    full = predicted(plan, replace(workload, count=count))
    alone = predicted(plan, Workload(requests=[Request(1, _RATE_STEPS)], count=1))
    if full is None or alone is None or not 0 < full.prefill_s < full.seconds:
        return None
    each = count / len(workload.requests)
    return PlanRates(
        prompt_tokens_per_s=each * sum(one.prompt for one in workload.requests) / full.prefill_s,
        output_tokens_per_s=each * sum(one.output for one in workload.requests) / (full.seconds - full.prefill_s),
        step_s=(alone.seconds - alone.prefill_s) / _RATE_STEPS,
    )


def _obstacle(config: BatchConfig, arguments: Mapping[str, object], *, on_cpu: bool) -> str | None:
    """Return why a start is not planned, whatever profile there is."""
    reasons = {
        "--plan off": config.schedule.plan == "off",
        "profiles are of CPUs so far": not on_cpu,
        "several ranks are not planned": any((_count(arguments, name) or 1) > 1 for name in _RANKS),
        "flags change the model, and a profile is of the model as its files are": any(
            arguments.get(name) not in (None, "", "{}") for name in _OTHER_MODEL
        ),
        "mix_prefill is not predicted": config.schedule.mix_prefill > 0,
        "profiles are of the model's own activations": config.forward.cpu_activations != "model",
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _profile(model: PlannedModel, again: str) -> Profile:
    """Return the kept profile. Raises ConfigError for one that does not hold, and for one that was disturbed."""
    profile = profile_that_holds(model.directory, dtype=model.dtype, weight_dtype=model.weight_dtype, again=again)
    cores = int(profile.machine["cores"])
    if profile.was_disturbed:
        raise ConfigError(
            f"other programs kept {profile.load:g} of {cores} cores busy when this model's profile was made; "
            f"{again} makes a better one when they do not run"
        )
    return profile


def _inputs(
    config: BatchConfig,
    arguments: Mapping[str, object],
    model: PlannedModel,
    profile: Profile,
    batch: Workload,
    again: str,
) -> PlanInputs:
    page_size = _count(arguments, "page_size") or PAGE_SIZE
    target = Target(
        device=CPU,
        budget=_budget(config, arguments),
        page_size=page_size,
        length=batch.longest,
        most=0 if config.memory.device_memory else int(_SURE_SHARE * free_bytes()),
    )
    memory_of = remembered(CandidateMemory(model=model.files, target=target, base=config))
    pool = _count(arguments, "max_total_tokens")
    return PlanInputs(
        profile=profile,
        layers=model.layers,
        memory_of=memory_of if pool is None else _within_pool(memory_of, pool // page_size),
        page_size=page_size,
        longest=_context(model, arguments),
        most_running=_count(arguments, "max_running_requests"),
        again=again,
    )


def _within_pool(memory_of: MemoryOf, pages: int) -> MemoryOf:
    """Return `memory_of` for a pool of at most so many pages on the device."""

    def limited(candidate: Candidate) -> MemoryMap:
        found = memory_of(candidate)
        return replace(found, room=replace(found.room, device=min(found.room.device, pages)))

    return limited


def _context(model: PlannedModel, arguments: Mapping[str, object]) -> int:
    asked = _count(arguments, "context_length")
    return max(asked or number(model.text.get, *CONTEXT_FIELDS, default=1 << 30), 2)


def usual_budget() -> int:
    """Return the bytes that SGLang gives an engine on this machine's CPU."""
    return int(CPU_SHARE * machine_bytes())


def _budget(config: BatchConfig, arguments: Mapping[str, object]) -> int:
    """Return the bytes for a process with its weights and KV: its budget, or what SGLang would give it."""
    if config.memory.device_memory:
        return int(_SURE_SHARE * config.memory.device_memory)
    asked = arguments.get("mem_fraction_static")
    share = asked if isinstance(asked, float) else CPU_SHARE
    return int(min(share * machine_bytes(), _SURE_SHARE * free_bytes()))


def _count(arguments: Mapping[str, object], name: str) -> int | None:
    value = arguments.get(name)
    return value if isinstance(value, int) else None
