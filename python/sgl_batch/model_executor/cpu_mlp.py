"""Owns how the MLPs of dense families compute on a CPU: as a single expert that takes every row, in one call.

The intermediate values then stay in the caches, instead of three passes over memory.
"""

from __future__ import annotations

import torch

from sgl_batch.layers.packed_weights import PackedWeights
from sgl_batch.sglang_adapter.layers import plain_mlps, replace_forwards
from sgl_batch.sglang_adapter.types.models import DenseMlp

MLPS = ("LlamaMLP", "Qwen2MLP")
"""SGLang's classes; Qwen3's is Qwen2's."""


class CpuMlps:
    """Replaces the forwards of a loaded model's MLPs whose weights the kernels accept; others stay SGLang's."""

    def __init__(self, weights: PackedWeights) -> None:
        self._weights = weights

    def adopt(self, model: torch.nn.Module) -> None:
        """Pack the MLPs' weights and replace their forwards, before the model's other linear layers are packed.

        Weights may be packed already.
        """
        for mlp in plain_mlps(model, MLPS):
            if mlp.gate_up_proj.weight not in self._weights:
                self._weights.add_experts(mlp.gate_up_proj.weight, mlp.down_proj.weight)
        replace_forwards(model, dict.fromkeys(MLPS, self._mlp))

    def _mlp(self, module: DenseMlp, hidden: torch.Tensor, *rest: object, **named: object) -> torch.Tensor:
        gate_up, down = module.gate_up_proj.weight, module.down_proj.weight
        if gate_up not in self._weights:
            own: torch.Tensor = type(module).forward(module, hidden, *rest, **named)
            return own
        return self._weights.mlp(hidden, gate_up, down)
