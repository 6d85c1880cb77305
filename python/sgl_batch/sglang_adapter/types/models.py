"""What we use of the layers of SGLang's models, and of its attention backends. A whole model is a torch.nn.Module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from sgl_batch.sglang_adapter.types.batches import ForwardBatch


class AttentionBackend(Protocol):
    """What plans and computes attention. A plan is the backend's own; REENTRANT_BACKENDS keep it in one attribute."""

    forward_metadata: object

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan a batch, in `forward_metadata`."""


class ExpertOptions(Protocol):
    """How a layer's experts compute (SGLang's MoeRunnerConfig)."""

    activation: str
    apply_router_weight_on_input: bool
    routed_scaling_factor: float | None


class ExpertMethod(Protocol):
    """What computes a layer's experts (SGLang's UnquantizedFusedMoEMethod)."""

    moe_runner_config: ExpertOptions
    apply: Callable[[ExpertLayer, RoutedRows], ExpertOutput]
    """SGLang's own computation, or what is put in its place."""


class ExpertLayer(Protocol):
    """A layer's experts on this rank (SGLang's FusedMoE): E of them, of M hidden and N inner channels."""

    w13_weight: torch.Tensor
    """Gate and up weights [E, 2 * N, M]."""

    w2_weight: torch.Tensor
    """Down weights [E, M, N]."""

    top_k: int
    num_experts: int
    """Of all ranks."""

    quant_method: ExpertMethod

    def run_moe_core(self, dispatch_output: RoutedRows) -> ExpertOutput:
        """Compute the rows with `quant_method`."""


class ExpertOutput(Protocol):
    """What a layer's experts add to each row (SGLang's StandardCombineInput)."""

    hidden_states: torch.Tensor
    """[R, M]."""


class Weighted(Protocol):
    """A layer with one matrix of weights, as they were loaded."""

    weight: torch.Tensor
    """[outputs, inputs]."""


class DenseMlp(Protocol):
    """A block of SiLU(gate) * up and down (SGLang's DeepseekV2MLP)."""

    gate_up_proj: Weighted
    down_proj: Weighted


class ChoiceOptions(Protocol):
    """How a layer chooses experts (SGLang's TopKConfig)."""

    top_k: int
    num_expert_group: int
    topk_group: int
    scoring_func: str
    correction_bias: torch.Tensor | None
    """[E]."""

    renormalize: bool


class ExpertChooser(Protocol):
    """A layer that chooses experts (SGLang's TopK)."""

    topk_config: ChoiceOptions
    layer_id: int


class ExpertChoice(Protocol):
    """The choice of experts of T rows (SGLang's StandardTopKOutput)."""

    topk_weights: torch.Tensor
    """[T, K]."""

    topk_ids: torch.Tensor
    """[T, K]."""


class RoutedRows(Protocol):
    """Rows and their choice of experts (SGLang's StandardDispatchOutput): R rows of M channels, K experts each."""

    hidden_states: torch.Tensor
    """[R, M]."""

    topk_output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """Weights [R, K], ids [R, K], and the router's logits [R, E]."""
