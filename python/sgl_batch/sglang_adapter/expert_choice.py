"""SGLang's layer that chooses experts: how its options have it score them, and what it tells of each choice."""

from __future__ import annotations

from typing import Any

import torch

from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.types.models import ExpertChoice, ExpertChooser
from sgl_batch.sglang_adapter.types.requests import Request

with bootstrap.importing():
    from sglang.srt.environ import envs
    from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
    from sglang.srt.layers.moe.topk import StandardTopKOutput, TopK, capture_routed_experts_if_allowed
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer, set_global_experts_capturer


def scoring_of(topk: Any, given: dict[str, Any]) -> str | None:
    """How the layer, called with these options, scores experts: by "softmax" or "sigmoid" of the logits.

    The best are chosen, of the best groups where there are groups, and by score and bias where there is a bias. None
    where that is not all.
    """
    config = topk.topk_config
    simulated = envs.SGLANG_SIMULATE_UNIFORM_EXPERTS.get() or envs.SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS.get()
    is_all = (
        config.num_fused_shared_experts == 0
        and config.custom_routing_function is None
        and not config.apply_routed_scaling_factor_on_output
        and topk.waterfill_balancer is None
        and not topk.enable_waterfill
        and not simulated
        and all(value is None for value in given.values())
    )
    biased = config.correction_bias is not None
    # SGLang scores so in groups with a bias, whatever its option says.
    scoring = "sigmoid" if config.use_grouped_topk and biased else str(config.scoring_func)
    known = scoring == "sigmoid" or (scoring == "softmax" and not biased)
    return scoring if is_all and known else None


def report_choice(
    topk: ExpertChooser, weights_TK: torch.Tensor, ids_TK: torch.Tensor, logits_TE: torch.Tensor
) -> ExpertChoice:
    """The layer's answer, told to whoever counts or captures choices."""
    capture_routed_experts_if_allowed(topk.topk_config, topk.layer_id, ids_TK)
    get_global_expert_distribution_recorder().on_select_experts(topk_ids=ids_TK)
    choice: ExpertChoice = StandardTopKOutput(topk_weights=weights_TK, topk_ids=ids_TK, router_logits=logits_TE)
    return choice


def expert_choosing_layers(model: torch.nn.Module) -> list[int]:
    """The numbers under which the layers of a loaded model tell their choices.

    SGLang gives those of Mixtral none; from now on each has its own.
    """
    for number, layer in enumerate(getattr(getattr(model, "model", None), "layers", ())):
        for module in layer.modules():
            if isinstance(module, TopK):
                module.layer_id = number
    return [module.layer_id for module in model.modules() if isinstance(module, TopK)]


def capture_choices_with(choices: object) -> None:
    """Have every choice of this process told to `choices`, which SGLang asks for those of a request that has ended."""
    set_global_experts_capturer(choices)


def attach_expert_choices(request: Request) -> None:
    """Put into the answer of a request that ends outside a batch what it asks of the choice of its experts."""
    choices = get_global_experts_capturer()
    if request.return_routed_experts and choices is not None:
        request.routed_experts = choices.of(request)
