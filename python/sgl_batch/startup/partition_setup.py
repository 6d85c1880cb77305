"""Owns the costs by which partitions are decided, at a scheduler's start: kept from an earlier one, or measured.

core/partition_costs says what follows from them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

from sgl_batch.core.partition_costs import MeasuredPasses, PartitionCosts
from sgl_batch.core.start_choices import Choice
from sgl_batch.model_executor.model_runner import BatchModelRunner
from sgl_batch.model_executor.partition_trial import PartitionTrial
from sgl_batch.model_executor.run_context import RunContext
from sgl_batch.processor import read_processor
from sgl_batch.startup.choice_cache import ChoiceCache, ChoiceKey, choice_directory, model_hash, versions

logger = logging.getLogger(__name__)

OPTION = "partition_costs"
KEPT, MEASURE = "kept", "measure"

# What is measured, as far as it fits: one sequence on all ranks together and so many for each, tokens of KV, prompts.
_EACH = (1, 2, 4)
_CONTEXTS = (64, 1024)
_PROMPTS = (128, 512)
# What gloo copies between two ranks of a machine, at least.
_COPY_BYTES_PER_S = 0.5e9


def settle_partitions(
    runner: BatchModelRunner, context: RunContext, all_done: Callable[[bool], bool]
) -> PartitionCosts | None:
    """Return the costs for this model on these ranks; None where none are known. Every rank calls this.

    What a partition of all ranks keeps is made now, so that the first one does not wait for it.

    The control rank alone reads and keeps them, and it alone decides by them; the others return None where they are
    kept from an earlier start.

    Args:
        runner: This rank's, which can share passes, without sequences.
        context: What is common to this rank's parts. With --partition-costs measure, costs that are not kept are
            measured.
        all_done: The agreement of all ranks.
    """
    ranks, wanted = context.rank_context, context.config.ranks.partition_costs
    assert ranks is not None, "several ranks have partitions"
    if context.config.ranks.partition_experts == "split":
        runner.partition_over(range(ranks.topology.num_attention_ranks))
        runner.partition_over(None)
    if wanted not in (KEPT, MEASURE):
        return None
    decides = ranks.rank == ranks.topology.control_rank
    cache, key = ChoiceCache(choice_directory()), _key(runner, context)
    costs = _read(cache, key) if decides else None
    if wanted == KEPT or all_done(costs is not None or not decides):
        return costs
    with context.counters.uncounted():
        costs = _measured(runner, context)
    if costs is not None and decides:
        cache.keep(key, Choice(mode="measured", why=_text(costs), numbers=_numbers(costs)))
        logger.info("ranks share passes by their measured cost: %s", _text(costs))
    return costs


def _key(runner: BatchModelRunner, context: RunContext) -> ChoiceKey:
    args, forward = runner.server_args, context.config.forward
    assert context.rank_context is not None, "several ranks have partitions"
    return ChoiceKey(
        option=OPTION,
        device=read_processor().name or "cpu",
        model=model_hash(args.model_path),
        versions=versions(),
        settings={
            "ranks": context.rank_context.topology.num_attention_ranks,
            "threads": torch.get_num_threads(),
            "accumulate": forward.accumulate,
            "weights": forward.cpu_weight_dtype,
            "activations": forward.cpu_activations,
            "dispatcher": context.config.ranks.token_dispatcher,
            "expert_runner": runner.expert_runner,
            "experts": context.config.ranks.partition_experts,
            "dtype": str(runner.model_config.dtype),
            "kv_dtype": args.kv_cache_dtype,
        },
    )


def _measured(runner: BatchModelRunner, context: RunContext) -> PartitionCosts | None:
    """Return the costs, or None where the pool of KV has no room for a measurement. All ranks have equal pools."""
    ranks = context.rank_context
    assert ranks is not None, "several ranks have partitions"
    count, plan = ranks.topology.num_attention_ranks, context.in_force.plan
    trial = PartitionTrial(runner, plan, rank=ranks.attention_rank, ranks=count)
    short, long = _CONTEXTS
    wanted = sorted({1, *(each * count for each in _EACH)})
    sequences = tuple(n for n in wanted if n <= plan.decode.b_moe and trial.fits(n, short + 1))
    prompts = tuple(tokens for tokens in _PROMPTS if trial.fits(1, tokens))
    if not sequences:
        return None

    def passes(*, shared: bool) -> MeasuredPasses:
        step_s = tuple(trial.step_s(number, short, shared=shared) for number in sequences)
        longer_s = trial.step_s(1, long, shared=shared) - step_s[0] if trial.fits(1, long + 1) else 0.0
        return MeasuredPasses(
            step_s=step_s,
            kv_token_s=max(0.0, longer_s) / (long - short),
            prompt_s=tuple(trial.prompt_s(tokens, shared=shared) for tokens in prompts),
        )

    return PartitionCosts(
        ranks=count,
        sequences=sequences,
        prompt_tokens=prompts,
        alone=passes(shared=False),
        shared=passes(shared=True),
        move_token_s=runner.kv_token_bytes / _COPY_BYTES_PER_S,
    )


def _numbers(costs: PartitionCosts) -> Mapping[str, tuple[float, ...]]:
    """Return costs as the numbers of a kept choice."""
    found: dict[str, tuple[float, ...]] = {
        "ranks": (costs.ranks,),
        "sequences": costs.sequences,
        "prompt tokens": costs.prompt_tokens,
        "move token": (costs.move_token_s,),
    }
    for name, one in (("alone", costs.alone), ("shared", costs.shared)):
        found |= {f"step {name}": one.step_s, f"KV token {name}": (one.kv_token_s,), f"prompt {name}": one.prompt_s}
    return found


def _read(cache: ChoiceCache, key: ChoiceKey) -> PartitionCosts | None:
    kept = cache.find(key)
    if kept is None:
        return None
    numbers = kept.numbers

    def passes(name: str) -> dict[str, object]:
        (kv_token_s,) = numbers[f"KV token {name}"]
        return {"step_s": numbers[f"step {name}"], "kv_token_s": kv_token_s, "prompt_s": numbers[f"prompt {name}"]}

    try:
        (ranks,), (move_token_s,) = numbers["ranks"], numbers["move token"]
        sizes = {"sequences": numbers["sequences"], "prompt_tokens": numbers["prompt tokens"]}
        forms = {name: passes(name) for name in ("alone", "shared")}
        return PartitionCosts.of({"ranks": ranks, "move_token_s": move_token_s, **sizes, **forms})
    except (LookupError, TypeError, ValueError) as error:
        logger.warning("the kept costs of partitions are not used: %s: %s", type(error).__name__, error)
        return None


def _text(costs: PartitionCosts) -> str:
    """Return costs in a sentence."""
    step = f"a decode step of one sequence takes {1e3 * costs.alone.step_s[0]:.2f} ms, shared by {costs.ranks} ranks "
    least = costs.least_prompt_tokens
    prompts = f"prompts are shared from {least} tokens on" if least else "prompts are not shared"
    return f"{step}{1e3 * costs.shared.step_s[0]:.2f}; {prompts}"
