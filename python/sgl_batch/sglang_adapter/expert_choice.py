"""Adapts SGLang's TopK layer, which chooses experts: how its options score them, and who is notified of a choice.

Our CPU operators make the choice in SGLang's place, and must notify the same recorders.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import torch

from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.types.models import ExpertChoice, ExpertChooser
from sgl_batch.sglang_adapter.types.requests import Request

with bootstrap.importing():
    from sglang.srt.environ import envs
    from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
    from sglang.srt.layers.moe.topk import StandardTopKOutput, TopK, capture_routed_experts_if_allowed
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer, set_global_experts_capturer

R = TypeVar("R", contravariant=True)


class ChoiceRecord(Protocol[R]):
    """The record that `capture_choices_with` was given: the experts that were chosen for each token of a request."""

    def of(self, request: R) -> torch.Tensor:
        """Return the choices that the request's answer reports."""

    def written_down(self, request: R) -> bytes:
        """Return the choices for all positions of a request so far."""

    def put_back(self, request: R, written: bytes) -> None:
        """Record for a request what `written_down` returned for it in another process."""


def scoring_of(topk: Any, given: dict[str, Any]) -> str | None:
    """Return how the layer, called with these options, scores experts: "softmax" or "sigmoid" of the logits.

    The layer then chooses the best experts, of the best groups if there are groups, by score plus bias if there is a
    bias. None if the layer does anything else.
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
    # With groups and a bias SGLang scores by sigmoid, whatever its option says.
    scoring = "sigmoid" if config.use_grouped_topk and biased else str(config.scoring_func)
    known = scoring == "sigmoid" or (scoring == "softmax" and not biased)
    return scoring if is_all and known else None


def report_choice(
    topk: ExpertChooser, weights_TK: torch.Tensor, ids_TK: torch.Tensor, logits_TE: torch.Tensor
) -> ExpertChoice:
    """Return a choice in SGLang's form, and report it to SGLang's recorder and capturer of choices."""
    capture_routed_experts_if_allowed(topk.topk_config, topk.layer_id, ids_TK)
    get_global_expert_distribution_recorder().on_select_experts(topk_ids=ids_TK)
    choice: ExpertChoice = StandardTopKOutput(topk_weights=weights_TK, topk_ids=ids_TK, router_logits=logits_TE)
    return choice


def reports_choices(server_args: Any) -> bool:
    """Return whether an engine of these arguments gives `report_choice` anybody to report to."""
    return bool(server_args.enable_return_routed_experts) or server_args.expert_distribution_recorder_mode is not None


def expert_choosing_layers(model: torch.nn.Module) -> list[int]:
    """Number the layers of a loaded model that choose experts, and return their numbers.

    SGLang numbers them itself, except those of Mixtral.
    """
    for number, layer in enumerate(getattr(getattr(model, "model", None), "layers", ())):
        for module in layer.modules():
            if isinstance(module, TopK):
                module.layer_id = number
    return [module.layer_id for module in model.modules() if isinstance(module, TopK)]


def capture_choices_with(choices: object) -> None:
    """Replace SGLang's capturer of choices: `choices` gets every choice of this process.

    SGLang reads the choices of a finished request from it.
    """
    set_global_experts_capturer(choices)


def choice_record() -> ChoiceRecord[Request] | None:
    """Return the record of the choices of this process; None where there is none."""
    record: ChoiceRecord[Request] | None = get_global_experts_capturer()
    return record


def attach_expert_choices(request: Request) -> None:
    """Add the choices of experts to the answer of a request that ends outside a batch, if it asks for them."""
    choices = choice_record()
    if request.return_routed_experts and choices is not None:
        request.routed_experts = choices.of(request)
