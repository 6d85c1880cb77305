"""Owns the types of the layers of SGLang's models, and of its attention backends.

A model and its layers are passed as torch.nn.Module. Code that reads their attributes casts them to these types.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, overload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from sgl_batch.sglang_adapter.types.batches import ForwardBatch, LogitsOutput


class AttentionBackend(Protocol):
    """Computes attention with its own metadata of a batch, which REENTRANT_BACKENDS keep in one attribute."""

    forward_metadata: object

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Make the metadata of a batch, in `forward_metadata`."""


class ExpertOptions(Protocol):
    """The options of a layer's experts (SGLang's MoeRunnerConfig)."""

    activation: str
    apply_router_weight_on_input: bool
    routed_scaling_factor: float | None
    gemm1_alpha: float | None
    """The slope of SiLU."""

    gemm1_clamp_limit: float | None
    gate_up_interleaved: bool
    """Whether rows of gate and up alternate in w13; it is read only with gemm1_alpha."""


class ExpertMethod(Protocol):
    """The method that computes a layer's experts (SGLang's UnquantizedFusedMoEMethod)."""

    moe_runner_config: ExpertOptions
    apply: Callable[[ExpertLayer, RoutedRows], ExpertOutput]
    """SGLang's own computation, or its replacement."""


class ExpertLayer(Protocol):
    """A layer's E experts on this rank, with M hidden and N inner channels (SGLang's FusedMoE)."""

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
    """The output of a layer's experts for each row (SGLang's StandardCombineInput)."""

    hidden_states: torch.Tensor
    """[R, M]."""


class Weighted(Protocol):
    """A layer with one weight matrix, as it was loaded."""

    weight: torch.Tensor
    """[outputs, inputs]."""


class DenseMlp(Protocol):
    """An MLP: SiLU(gate) * up, then down (SGLang's DeepseekV2MLP)."""

    gate_up_proj: Weighted
    down_proj: Weighted

    def forward(self, hidden: torch.Tensor, /, *rest: object, **named: object) -> torch.Tensor:
        """Return its output for rows [T, M]."""


class ChoiceOptions(Protocol):
    """The options of a layer's choice of experts (SGLang's TopKConfig)."""

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

    def __call__(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> ExpertChoice:
        """Choose for rows [T, M] with logits [T, E]."""


class ExpertChoice(Protocol):
    """The choice of experts of T rows (SGLang's StandardTopKOutput)."""

    topk_weights: torch.Tensor
    """[T, K]."""

    topk_ids: torch.Tensor
    """[T, K]."""


class RoutedRows(Protocol):
    """R rows of M channels and their K chosen experts each (SGLang's StandardDispatchOutput)."""

    hidden_states: torch.Tensor
    """[R, M]."""

    topk_output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """Weights [R, K], ids [R, K], and the router's logits [R, E]."""


class Router(Protocol):
    """Scores experts (SGLang's MoEGate, or a linear layer, which also returns its bias)."""

    weight: torch.Tensor
    """[E, M]."""

    def __call__(self, hidden: torch.Tensor, /) -> torch.Tensor | tuple[torch.Tensor, object]:
        """Return the logits [T, E] of rows [T, M]."""


class ExpertModules(Protocol):
    """A block of experts, of any family."""

    gate: Router
    topk: ExpertChooser
    experts: ExpertLayer


class MixtralMoe(ExpertModules, Protocol):
    """Mixtral's or OLMoE's block of experts, with its call."""

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return its output for rows [T, M]."""


class DenseBlock(Protocol):
    """The block after attention in a layer without experts."""

    def __call__(self, hidden: torch.Tensor, forward_batch: ForwardBatch | None, /) -> torch.Tensor:
        """Return its output for rows [T, M]."""


class SparseBlock(ExpertModules, Protocol):
    """The block after attention in a layer with experts."""

    def __call__(self, hidden_states: torch.Tensor, forward_batch: ForwardBatch | None) -> torch.Tensor:
        """Return its output for rows [T, M]."""


class ScaledMoe(Protocol):
    """The additional attributes of DeepSeek's and GLM's blocks of experts. They may also have `shared_experts`."""

    routed_scaling_factor: float


class GatedSharedMoe(Protocol):
    """The additional attributes of Qwen2-MoE's block of experts: a shared expert and its gate."""

    shared_expert: Callable[[torch.Tensor], torch.Tensor] | None
    shared_expert_gate: Callable[[torch.Tensor], torch.Tensor]
    """From rows [T, M] to [T, 1]; the sigmoid weights the expert."""


class GptOssMoe(Protocol):
    """The attributes of gpt-oss's block of experts with names of their own."""

    router: Router


class Norm(Protocol):
    """A layer's norm (SGLang's RMSNorm)."""

    @overload
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows [T, M] normed."""

    @overload
    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of both normed, and the sum. They may overwrite the arguments."""


class Attention(Protocol):
    """A layer's attention."""

    def __call__(
        self, *, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Rows [T, M]."""


class LatentAttention(Protocol):
    """A layer's latent attention (SGLang's DeepseekV2AttentionMLA)."""

    def __call__(
        self,
        *,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: ForwardBatch,
        zero_allocator: object,
    ) -> torch.Tensor:
        """Rows [T, M]."""


class LayerCommunicator(Protocol):
    """A layer's norms with what tensor parallelism adds around them. Hidden states and residuals are [T, M]."""

    def prepare_attn(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None, forward_batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run what comes before attention."""

    def prepare_mlp(
        self, hidden_states: torch.Tensor, residual: torch.Tensor, forward_batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run what comes between attention and experts."""

    def postprocess_layer(
        self, hidden_states: torch.Tensor, residual: torch.Tensor, forward_batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run what comes after the experts."""


class PlainLayer(Protocol):
    """A decoder layer that holds its norms itself (SGLang's LlamaDecoderLayer)."""

    input_layernorm: Norm
    self_attn: Attention
    post_attention_layernorm: Norm


class MixtralLayer(Protocol):
    """The experts of a decoder layer of Mixtral."""

    block_sparse_moe: MixtralMoe


class DenseLayer(Protocol):
    """The MLP of a decoder layer without experts."""

    mlp: Callable[[torch.Tensor], torch.Tensor]


class OlmoeLayer(Protocol):
    """The experts of a decoder layer of OLMoE."""

    mlp: MixtralMoe


class MinimaxLayer(Protocol):
    """The block after attention in a decoder layer of MiniMax-M2."""

    block_sparse_moe: SparseBlock


class CommunicatingLayer(Protocol):
    """A decoder layer whose communicator holds the norms; its attention is AttendingLayer's or LatentLayer's."""

    layer_communicator: LayerCommunicator
    mlp: DenseBlock | SparseBlock


class AttendingLayer(Protocol):
    """A decoder layer with attention over keys and values (SGLang's Qwen3MoeDecoderLayer)."""

    self_attn: Attention


class LatentLayer(Protocol):
    """A decoder layer with latent attention (SGLang's DeepseekV2DecoderLayer)."""

    self_attn: LatentAttention


class DecoderBody(Protocol):
    """The layers of a model, its embedding and its last norm; this process holds layers [start_layer, end_layer)."""

    embed_tokens: Callable[[torch.Tensor], torch.Tensor]
    layers: Sequence[torch.nn.Module]
    start_layer: int
    end_layer: int
    norm: Norm


class CausalModel(Protocol):
    """A whole model."""

    model: DecoderBody
    lm_head: object
    logits_processor: Callable[[torch.Tensor, torch.Tensor, object, ForwardBatch], LogitsOutput]
    """Called with token ids [T], hidden states [T, M], `lm_head` and the batch."""
