"""Owns the choice of the forward pass for decode groups at a scheduler's start: asked for, cached or measured."""

from __future__ import annotations

import logging

import torch

from sgl_batch.core.decode_choice import (
    AUTO,
    DEFAULT,
    MEASURE,
    MODES,
    DecodeForms,
    candidates,
    refusal,
)
from sgl_batch.core.start_choices import Choice, earlier_choices, taken_over
from sgl_batch.errors import ConfigError
from sgl_batch.model_executor.decode_trial import DecodeTrial
from sgl_batch.model_executor.model_runner import BatchModelRunner
from sgl_batch.model_executor.run_context import RunContext
from sgl_batch.startup.choice_cache import ChoiceCache, ChoiceKey, choice_directory, model_hash, versions
from sgl_batch.startup.self_check import settle, settle_once

logger = logging.getLogger(__name__)

OPTION = "decode_forward"
# The self-check also measures a group that is this much smaller than the largest, as at the end of a batch.
_SMALL_SHARE = 16
# Counters that keep what the self-check counts, because the graphs that it captures stay.
_STAYS = ("graphs_captured", "graph_bytes")


def settle_decode(runner: BatchModelRunner, context: RunContext) -> Choice:
    """Choose the mode, and set it in the runner. Raises ConfigError for a mode that cannot compute here."""
    choice = _choice(runner, context)
    runner.compute_decode_by(choice.mode)
    return choice


def _choice(runner: BatchModelRunner, context: RunContext) -> Choice:
    wanted, on_cpu = context.config.forward.decode_forward, context.cpu_operators is not None
    obstacle, has_adapter = _obstacle(runner, context), runner.layer_runner is not None
    if wanted not in (AUTO, MEASURE):
        why = refusal(wanted, DecodeForms(has_adapter=has_adapter, obstacle=obstacle))
        if why is not None:
            raise ConfigError(f"decode_forward is {wanted!r}, and {why}: choose 'auto' or 'default'")
        return Choice(mode=wanted, why=f"{wanted}: asked for by decode_forward")
    earlier = earlier_choices(context.config.forward.start_choices).get(OPTION)
    forms = DecodeForms(has_adapter=has_adapter, obstacle=obstacle)
    if earlier is not None and earlier.mode in MODES and refusal(earlier.mode, forms) is None:
        return taken_over(earlier)
    if on_cpu and wanted == AUTO:
        return Choice(mode=DEFAULT, why="default: a CPU measures only where decode_forward is 'measure'")
    with context.counters.uncounted(_STAYS):
        return _measured(runner, context, has_adapter=has_adapter, obstacle=obstacle)


def _measured(runner: BatchModelRunner, context: RunContext, *, has_adapter: bool, obstacle: str | None) -> Choice:
    largest, args = context.in_force.plan.decode.b_moe, runner.server_args
    sizes = (largest, max(1, largest // _SMALL_SHARE))
    vocabulary = runner.model_config.vocab_size
    trial = DecodeTrial(runner, sizes, page_size=args.page_size, vocabulary=vocabulary)
    if not trial.sizes:
        return Choice(mode=DEFAULT, why="default: the pool of KV has no room for a measurement")
    own_graph = runner.layer_runner is not None and runner.layer_runner.layer_graphs is not None
    forms = DecodeForms(
        has_adapter=has_adapter, sglang_graph=_has_sglang_graph(trial), own_graph=own_graph, obstacle=obstacle
    )
    modes, deterministic = candidates(forms), bool(args.enable_deterministic_inference)
    plan, forward = context.in_force.plan, context.config.forward
    key = ChoiceKey(
        option=OPTION,
        device="cpu" if runner.device == "cpu" else torch.cuda.get_device_name(),
        model=model_hash(args.model_path),
        versions=versions(),
        settings={
            "modes": list(modes),
            "sizes": list(trial.sizes),
            "b_attn_decode": plan.decode.b_attn,
            "accumulate": forward.accumulate,
            "expert_runner": runner.expert_runner,
            "attention": args.attention_backend,
            "dtype": str(runner.model_config.dtype),
            "kv_dtype": args.kv_cache_dtype,
            "quantization": args.quantization,
        },
    )

    def measured() -> Choice:
        return settle(modes, trial, context.budget, deterministic=deterministic)

    if deterministic or len(modes) == 1:
        return measured()
    choice = settle_once(ChoiceCache(choice_directory()), key, modes.__contains__, measured)
    logger.info("decode groups are computed by %s", choice.why)
    return choice


def _has_sglang_graph(trial: DecodeTrial) -> bool:
    """Return whether the default mode runs the largest group by a graph of SGLang's; False where that is unknown."""
    try:
        return trial.graph_serves()
    except Exception as error:
        logger.debug("SGLang's graphs refused the batch of the self-check", exc_info=True)
        logger.warning("SGLang's own decode graphs are not measured: %s: %s", type(error).__name__, error)
        return False


def _obstacle(runner: BatchModelRunner, context: RunContext) -> str | None:
    """Return why SGLang's own forward cannot compute this engine's decode groups, or None."""
    config, memory = context.config, context.config.memory
    reasons = {
        "SGLang's own forward does not exchange rows between ranks": context.rank_context is not None,
        "on_yield is called by the coroutine forward alone": config.forward.on_yield is not None,
        "prompts run with decode rows (mix_prefill)": config.schedule.mix_prefill > 0,
        "decode KV may be streamed (decode_kv)": memory.kv_store_bytes > 0
        and runner.layer_runner is not None
        and (memory.decode_kv == "streamed" or (memory.decode_kv == "auto" and runner.device == "cpu")),
        "weights are streamed": memory.weights == "streamed",
        "the choice of experts is returned": bool(runner.server_args.enable_return_routed_experts),
        "SGLang's own forward of latent attention does not run on a CPU": runner.device == "cpu"
        and runner.use_mla_backend,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)
