"""Owns how the blocks of DeepSeek-V2 and V3 compute on a CPU, in place of SGLang's own forwards of them.

Those need kernels of which there is no build, or torch operators of which a row's result depends on the rows beside it.
Routed experts are added up in float32, then come the shared experts' output and one rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
import torch.nn.functional as F

from sgl_batch.errors import ConfigError
from sgl_batch.layers import latent_attention
from sgl_batch.layers.moe.grouped_topk import Grouping, grouped_topk
from sgl_batch.layers.packed_weights import PackedWeights
from sgl_batch.model_executor.counters import Counters
from sgl_batch.model_executor.expert_exchange import ExpertSums, add_shared
from sgl_batch.model_executor.families import DeepseekFamily
from sgl_batch.sglang_adapter.expert_choice import choice_made
from sgl_batch.sglang_adapter.layers import put_forwards_under
from sgl_batch.sglang_adapter.types.batches import ForwardBatch
from sgl_batch.sglang_adapter.types.models import DenseMlp, ExpertChoice, ExpertChooser, ExpertModules, Weighted

# SGLang's classes.
_ATTENTION, _MOE, _MLP = "DeepseekV2AttentionMLA", "DeepseekV2MoE", "DeepseekV2MLP"
_GATE, _TOPK = "MoEGate", "TopK"
# What a model's configuration may ask for and is not computed here.
_OPTIONS = ("index_topk", "swiglu_limit", "llama_4_scaling", "quantization_config")


class CpuDeepseek:
    """Puts its methods under the blocks of a loaded model of the family."""

    def __init__(
        self,
        family: DeepseekFamily,
        kernels: ModuleType | None,
        weights: PackedWeights,
        expert_sums: ExpertSums,
        counters: Counters,
    ) -> None:
        self._family, self._kernels, self._weights = family, kernels, weights
        self._expert_sums, self._counters = expert_sums, counters

    def adopt(self, model: torch.nn.Module) -> None:
        """Pack the blocks' weights and let them compute here. Before the model's other linear layers are packed."""
        _check(model.config)
        forwards: dict[str, Callable[..., object]] = {
            _ATTENTION: self._attention,
            _MOE: self._moe,
            _MLP: self._mlp,
            _GATE: self._gate,
            _TOPK: self._topk,
        }
        blocks = put_forwards_under(model, forwards)
        for attention in blocks[_ATTENTION]:
            latent_attention.pack(attention, self._weights)
        for gate in blocks[_GATE]:
            self._weights.add_linear(gate.weight, exact=True)
        for mlp in blocks[_MLP]:
            self._weights.add_experts(mlp.gate_up_proj.weight, mlp.down_proj.weight)

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
        return add_shared(block, self._expert_sums(block.experts, hidden, weights_TK, ids_TK), hidden)

    def _mlp(self, module: DenseMlp, hidden: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """A dense layer, or the shared experts of one, as a lone expert that every row goes to."""
        one = (len(hidden), 1)
        with self._counters.clock.part("experts"):
            return self._weights.experts(
                hidden,
                module.gate_up_proj.weight[None],
                module.down_proj.weight[None],
                torch.ones(one),
                torch.zeros(one, dtype=torch.int32),
            )[0]

    def _gate(self, module: Weighted, hidden: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """Logits in float32 [T, E], as SGLang has them on a GPU: in bf16 many experts would tie."""
        rows = hidden.to(torch.float32)
        if module.weight in self._weights:
            return self._weights.linear(rows, module.weight)
        return F.linear(rows, module.weight.to(torch.float32))

    def _topk(self, module: ExpertChooser, hidden: torch.Tensor, logits_TE: torch.Tensor, **_: object) -> ExpertChoice:
        config = module.topk_config
        grouping = Grouping(groups=config.num_expert_group, kept_groups=config.topk_group, top_k=config.top_k)
        weights_TK, ids_TK = grouped_topk(
            logits_TE,
            grouping,
            scoring=config.scoring_func,
            bias_E=config.correction_bias,
            renormalize=config.renormalize,
            kernels=self._kernels,
        )
        return choice_made(module, weights_TK, ids_TK, logits_TE)


def _check(config: object) -> None:
    """Refuse what is not computed here, by name (invariant 3)."""
    asked = [f"{name}={value}" for name in _OPTIONS if (value := getattr(config, name, None)) is not None]
    if asked:
        raise ConfigError(
            "on a CPU, DeepSeek has attention over all tokens, plain SwiGLU and weights in bf16 or float32; this model "
            f"asks for {', '.join(asked)}"
        )
