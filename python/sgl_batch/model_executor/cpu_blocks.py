"""Owns how the blocks of some families compute on a CPU, in place of SGLang's own forwards.

SGLang's forwards need kernels that have no CPU build, or torch operators whose result for a row depends on the other
rows. Here routed experts are summed in float32, the shared experts' output is added, and the sum is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.nn.functional as F

from sgl_batch.errors import ConfigError
from sgl_batch.layers import latent_attention
from sgl_batch.layers.moe.expert_runner import ExpertCall
from sgl_batch.layers.packed_weights import PackedWeights
from sgl_batch.metrics.counters import Counters
from sgl_batch.model_executor.expert_exchange import add_shared
from sgl_batch.model_executor.families import CommunicatingFamily
from sgl_batch.sglang_adapter.layers import replace_forward, replace_forwards
from sgl_batch.sglang_adapter.types.batches import ForwardBatch
from sgl_batch.sglang_adapter.types.models import DenseMlp, ExpertModules, Weighted

# SGLang's classes.
_ATTENTION = "DeepseekV2AttentionMLA"
_MOES = ("DeepseekV2MoE", "Glm4MoeSparseMoeBlock", "Qwen2MoeSparseMoeBlock")
_GATES = ("MoEGate", "Glm4MoeGate")
BLOCK_MLPS = ("DeepseekV2MLP", "Glm4MoeMLP", "Qwen2MoeMLP", "DenseMlp")
"""Also SGLang's, but for DenseMlp, which we build for Qwen's dense layers."""
# Options of the config of a model with such blocks that are not computed here.
_OPTIONS = ("index_topk", "swiglu_limit", "llama_4_scaling", "quantization_config")
# Number types below this size come with scales, which are not computed here.
_LEAST_BYTES = 2


class CpuBlocks:
    """Replaces the forwards of the blocks of a loaded model of the family by its own methods."""

    def __init__(
        self, family: CommunicatingFamily, weights: PackedWeights, expert_call: ExpertCall, counters: Counters
    ) -> None:
        self._family, self._weights = family, weights
        self._expert_call, self._counters = expert_call, counters

    def adopt(self, model: torch.nn.Module) -> None:
        """Pack the blocks' weights and replace the blocks' forwards.

        Call it before the model's other linear layers are packed; MLPs may be packed already. Raises ConfigError for a
        model with an option that is not computed here.
        """
        forwards: dict[str, Callable[..., object]] = {
            _ATTENTION: self._attention,
            **dict.fromkeys(_MOES, self._moe),
            **dict.fromkeys(BLOCK_MLPS, self._mlp),
            **dict.fromkeys(_GATES, self._gate),
        }
        blocks = replace_forwards(model, forwards)
        mlps = [mlp for name in BLOCK_MLPS for mlp in blocks[name] if mlp.gate_up_proj.weight not in self._weights]
        if any(blocks.values()):
            _check(model.config, [mlp.gate_up_proj.weight for mlp in mlps])
        for attention in blocks[_ATTENTION]:
            latent_attention.pack(attention, self._weights)
        for gate in [gate for name in _GATES for gate in blocks[name]]:
            self._weights.add_linear(gate.weight, exact=True)
        for mlp in mlps:
            self._weights.add_experts(mlp.gate_up_proj.weight, mlp.down_proj.weight)
        for moe in [moe for name in _MOES for moe in blocks[name] if hasattr(moe, "shared_expert_gate")]:
            gate = moe.shared_expert_gate
            self._weights.add_linear(gate.weight, exact=True)
            replace_forward(gate, partial(self._weights.linear, weight=gate.weight))

    def _attention(
        self,
        module: torch.nn.Module,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: ForwardBatch,
        **_: object,
    ) -> torch.Tensor:
        if not len(hidden_states):
            return hidden_states
        return latent_attention.run(module, self._weights, positions, hidden_states, forward_batch)

    def _moe(self, module: ExpertModules, hidden: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        if not len(hidden):
            return hidden
        block = self._family.block_of(module)
        weights_TK, ids_TK = block.route(hidden)
        sums_TM = self._expert_call(block.experts, hidden, weights_TK, ids_TK, f32_output=True)
        return add_shared(block, sums_TM, hidden)

    def _mlp(self, module: DenseMlp, hidden: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """Compute a dense layer, or the shared experts of a layer, as a single expert that takes every row."""
        with self._counters.clock.part("experts"):
            return self._weights.mlp(hidden, module.gate_up_proj.weight, module.down_proj.weight)

    def _gate(self, module: Weighted, hidden: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """Return the logits [T, E] in float32, as SGLang has them on a GPU: in bf16 many experts would tie."""
        rows = hidden.to(torch.float32)
        if module.weight in self._weights:
            return self._weights.linear(rows, module.weight)
        return F.linear(rows, module.weight.to(torch.float32))


def _check(config: object, weights: Iterable[torch.Tensor]) -> None:
    """Raise ConfigError for options and weights that are not computed here, by name (invariant 3)."""
    asked = [f"{name}={value}" for name in _OPTIONS if (value := getattr(config, name, None)) is not None]
    asked += sorted({f"weights of {weight.dtype}" for weight in weights if weight.dtype.itemsize < _LEAST_BYTES})
    if asked:
        raise ConfigError(
            "on a CPU, models with dense layers or shared experts have attention over all tokens, plain SwiGLU and "
            f"weights in bf16 or float32; this model asks for {', '.join(asked)}"
        )
