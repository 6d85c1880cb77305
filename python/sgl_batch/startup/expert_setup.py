"""Owns the choice of the expert runner on a GPU, where the user leaves it open: taken over, cached or measured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from sgl_batch.core.expert_runner_choice import RunnerMeasured, RunnerTable, choose_runners
from sgl_batch.core.plan_in_force import PlanInForce
from sgl_batch.core.start_choices import Choice, earlier_choices, taken_over
from sgl_batch.layers.moe.expert_runner import ExpertCall
from sgl_batch.layers.moe.expert_shape import shape_of
from sgl_batch.model_executor.expert_trial import ExpertTrial
from sgl_batch.model_executor.time_budget import TimeBudget
from sgl_batch.sglang_adapter.types.messages import ServerArgs
from sgl_batch.sglang_adapter.types.models import ExpertLayer
from sgl_batch.startup.choice_cache import ChoiceCache, ChoiceKey, choice_directory, model_hash, versions
from sgl_batch.startup.self_check import measure, settle_once

logger = logging.getLogger(__name__)

OPTION = "expert_runner"
# The share of the time of all self-checks. Decode steps have the rest.
_SHARE_OF_TIME = 0.5
# Calls of whole decode and prefill groups are measured, and of groups this much smaller than a decode group, as at the
# end of a batch.
_SMALL_SHARE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSetup:
    """Chooses expert runners for `GpuExperts`. `device`: the GPU's name. `num_ranks`: the engine's number of ranks."""

    device: str
    in_force: PlanInForce
    server_args: ServerArgs
    budget: TimeBudget
    num_ranks: int

    def __call__(
        self, layers: Sequence[ExpertLayer], names: Sequence[str], call_of: Callable[[str], ExpertCall]
    ) -> Choice:
        """Return a table of runners, as text. `names` begins with the default runner, which computes until now."""
        first = names[0]
        if self.server_args.enable_deterministic_inference:
            return Choice(mode=first, why=f"{first}: the deterministic mode never switches by time")
        if self.num_ranks > 1:
            return Choice(mode=first, why=f"{first}: several ranks measure no expert runners")
        if len(names) == 1:
            return Choice(mode=first, why=f"{first}: no other expert runner is installed")
        earlier = earlier_choices(self.in_force.config.forward.start_choices).get(OPTION)
        if earlier is not None and _can_compute(names, earlier.mode):
            return taken_over(earlier)
        plan = self.in_force.plan
        tokens = sorted({max(1, plan.decode.b_moe // _SMALL_SHARE), plan.decode.b_moe, plan.prefill.b_moe})
        shape = shape_of(layers[0])
        key = ChoiceKey(
            option=OPTION,
            device=self.device,
            model=model_hash(self.server_args.model_path),
            versions=versions(),
            settings={"runners": list(names), "tokens": tokens, "shape": asdict(shape)},
        )

        def measured() -> Choice:
            trial = ExpertTrial(layers, tokens, call_of)
            with self.budget.spending(_SHARE_OF_TIME) as time_is_up:
                found = measure(names, trial.run, _merged, time_is_up, failed="experts are not computed by")
            return choose_runners(names, tokens, found, dtype=shape.dtype)

        choice = settle_once(ChoiceCache(choice_directory()), key, lambda mode: _can_compute(names, mode), measured)
        logger.info("experts are computed by %s", choice.why)
        return choice


def _can_compute(names: Sequence[str], mode: str) -> bool:
    """Return whether a table, given as text, names these runners only."""
    try:
        return RunnerTable.parse(mode).names <= set(names)
    except ValueError:
        return False


def _merged(before: RunnerMeasured, now: RunnerMeasured) -> RunnerMeasured:
    """Return the fastest call and the largest error for each number of tokens."""
    return RunnerMeasured(
        seconds=tuple(map(min, before.seconds, now.seconds)),
        host_seconds=tuple(map(min, before.host_seconds, now.host_seconds)),
        errors=tuple(map(max, before.errors, now.errors)),
    )
