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


class RoutedRows(Protocol):
    """Rows and their choice of experts (SGLang's StandardDispatchOutput): R rows of M channels, K experts each."""

    hidden_states: torch.Tensor
    """[R, M]."""

    topk_output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """Weights [R, K], ids [R, K], and the router's logits [R, E]."""
