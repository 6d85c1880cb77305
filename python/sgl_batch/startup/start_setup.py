"""Owns the choices at the start of a scheduler that follow from measured decode steps: overlap, and decode KV.

core/start_choices decides. decode_setup and expert_setup settle the other options.
"""

from __future__ import annotations

import logging

from sgl_batch.core.decode_choice import SGLANG, step_of
from sgl_batch.core.start_choices import (
    OFF,
    ON,
    PER_INTERVAL,
    RESIDENT,
    Choice,
    choose_decode_kv,
    choose_overlap,
    earlier_choices,
    taken_over,
)
from sgl_batch.kernel_loader import native_kernels
from sgl_batch.kv_offload.kv_tiers import KVTiers
from sgl_batch.kv_offload.store_errors import CopyError
from sgl_batch.model_executor.model_runner import BatchModelRunner
from sgl_batch.model_executor.run_context import RunContext
from sgl_batch.startup.gpu_arguments import chosen_attention, machine_facts, model_facts

logger = logging.getLogger(__name__)

_AUTO = "auto"


def attention_of(runner: BatchModelRunner) -> Choice:
    """Return the attention backend that was built when the model was loaded, with the rule that chose it.

    The rule is startup/gpu_arguments: SGLang's own choice, except where that cannot hold the plans of several
    sub-batches or is not installed. It is not measured: a second backend could be built over the same pages, but could
    not replace the first, because pools, workspace memory and code of SGLang's models follow the name of one.
    """
    args = runner.server_args
    mode = " and ".join(dict.fromkeys(args.get_attention_backends()))
    if runner.device == "cpu":
        return Choice(mode=mode, why=f"{mode}: a CPU has one attention backend")
    model = model_facts(str(args.model_path), args.revision)
    rule = chosen_attention({}, machine_facts(on_cpu=False), model)
    named = rule.arguments.get("attention_backend")
    if named not in (None, mode):
        return Choice(mode=mode, why=f"{mode}: asked for")
    why = f"{mode}: SGLang's own choice, or asked for"
    for sentence in rule.sentences:
        why = sentence.removeprefix("attention backend: ")
    return Choice(mode=mode, why=f"{why}; not measured, because the model is loaded for one backend")


def settle_overlap(context: RunContext, decode: Choice, *, deterministic: bool) -> Choice:
    """Choose whether steps overlap, from the times in `decode`. `deterministic`: SGLang's deterministic mode."""
    wanted, found = context.config.schedule.overlap, earlier_choices(context.config.forward.start_choices)
    if wanted != _AUTO:
        return Choice(mode=wanted, why=f"{wanted}: asked for by overlap")
    reasons = {
        "a CPU computes results and steps itself, and gains nothing": context.cpu_operators is not None,
        "several ranks process each step's results before they agree on the next": context.rank_context is not None,
        "the prompts in a step follow from the results before it (mix_prefill)": context.in_force.plan.mix_prefill,
        "the deterministic mode never switches by time": deterministic,
    }
    obstacle = next((reason for reason, applies in reasons.items() if applies), None)
    earlier = found.get("overlap")
    if obstacle is None and earlier is not None and earlier.mode in (ON, OFF):
        return taken_over(earlier)
    step_s, host_s = step_of(decode)
    return choose_overlap(step_s, host_s, obstacle=obstacle)


def why_no_drafts(runner: BatchModelRunner, context: RunContext) -> str | None:
    """Return why decode steps verify no drafts in this engine; None if they can."""
    own_rows = context.cpu_operators is not None and native_kernels() is not None and runner.layer_runner is not None
    reasons = {
        "only the native CPU kernels, for a model with an adapter, give a row the same result in a pass of any size": (
            not own_rows
        ),
        "the choices of experts are kept by step (--enable-return-routed-experts)": runner.expert_choices is not None,
        "the callback of --on-yield expects a row of each sequence": context.config.forward.on_yield is not None,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def settle_decode_kv(context: RunContext, tiers: KVTiers | None, decode: Choice, *, deterministic: bool) -> Choice:
    """Choose where decode KV lies: resident, streamed, or either, as measured interval by interval (`auto`)."""
    wanted, found = context.config.memory.decode_kv, earlier_choices(context.config.forward.start_choices)
    if tiers is None:
        return Choice(mode=RESIDENT, why="resident: there is no host KV store")
    if not tiers.stages_prompts:
        why = "this model has no family adapter, so sequences move to the store and back whole"
        logger.warning("the host KV store is exclusive, and prompts are computed on the device alone: %s", why)
        return Choice(mode=RESIDENT, why=f"resident: {why}")
    if tiers.stored.exclusive:
        return Choice(mode=RESIDENT, why="resident: an exclusive store holds no KV that is on the device")
    if wanted != _AUTO:
        return Choice(mode=wanted, why=f"{wanted}: asked for by decode_kv")
    if context.rank_context is not None:
        return Choice(mode=RESIDENT, why="resident: several ranks do not choose")
    if context.cpu_operators is not None:
        return Choice(mode=PER_INTERVAL, why="auto: a CPU measures both, an interval each")
    if deterministic:
        return Choice(mode=RESIDENT, why="resident: the deterministic mode never switches by time")
    if decode.mode == SGLANG:
        return Choice(mode=RESIDENT, why="resident: SGLang's own forward, which computes decode, streams none")
    earlier = found.get("decode_kv")
    if earlier is not None and earlier.mode in (RESIDENT, PER_INTERVAL):
        return taken_over(earlier)
    return _by_copies(tiers, step_of(decode)[0])


def _by_copies(tiers: KVTiers, step_s: float | None) -> Choice:
    if step_s is None:
        return Choice(mode=RESIDENT, why="resident: no decode step was measured")
    try:
        copied_bytes_per_s = tiers.copy_rate()
    except CopyError as error:
        logger.warning("decode KV stays on the device, because a copy from the host KV store failed: %s", error)
        return Choice(mode=RESIDENT, why=f"resident: a copy from the host KV store failed: {error}")
    return choose_decode_kv(step_s, copied_bytes_per_s, tiers.pool_bytes)
