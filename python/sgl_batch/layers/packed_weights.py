"""Owns which weights of a model lie in the native kernels' packed form, and computes with them.

It decides neither which rows meet which weight nor when weights change; whoever writes to a packed weight does so
under `plain()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

from sgl_batch.layers import cpu_gemm
from sgl_batch.layers.moe import cpu_experts


class PackedWeights:
    """Weights packed in place, so that packing takes no memory: a packed tensor keeps its shape, not its order.

    `kernels`: the module `sgl_batch_kernel`, or None where it is not installed: then nothing is ever packed, and torch
    operators compute everything.
    """

    def __init__(self, kernels: ModuleType | None) -> None:
        self._kernels = kernels
        self._matrices: dict[int, torch.Tensor] = {}

    def add_linear(self, weight: torch.Tensor) -> bool:
        """Pack a weight [out, in]; False where the kernels cannot take it."""
        return self._pack([weight.data[None]])

    def add_experts(self, w13: torch.Tensor, w2: torch.Tensor) -> bool:
        """Pack the experts' weights [E, 2I, M], gate and up half each by itself, and [E, M, I]; False likewise."""
        experts, double, hidden = w13.shape
        return self._pack([w13.data.view(2 * experts, double // 2, hidden), w2.data])

    def add_by_head(self, weight_HNK: torch.Tensor) -> bool:
        """Pack a weight [out, in] for each head; False likewise."""
        return self._pack([weight_HNK.data])

    def _pack(self, tensors: list[torch.Tensor]) -> bool:
        if self._kernels is None or not all(_packable(tensor) for tensor in tensors):
            return False
        for tensor in tensors:
            assert tensor.data_ptr() not in self._matrices, "a weight is packed once"
            self._kernels.pack_(tensor)
            self._matrices[tensor.data_ptr()] = tensor
        return True

    def __len__(self) -> int:
        return len(self._matrices)

    def __contains__(self, weight: torch.Tensor) -> bool:
        """Whether a weight begins where a packed one does."""
        return weight.data_ptr() in self._matrices

    @contextmanager
    def plain(self) -> Iterator[None]:
        """All weights in their plain order inside the block, packed again after it."""
        if self._kernels is not None:
            for tensor in self._matrices.values():
                self._kernels.unpack_(tensor)
        try:
            yield
        finally:
            if self._kernels is not None:
                for tensor in self._matrices.values():
                    self._kernels.pack_(tensor)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Rows [..., in] times a weight [out, in], plus a bias [out]; the result has x's number type."""
        if self._kernels is None or weight not in self:
            return cpu_gemm.linear(x, weight, bias)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out: torch.Tensor = self._kernels.linear(rows, weight, bias)
        return out.view(*x.shape[:-1], -1)

    def by_head(self, x_THK: torch.Tensor, weight_HNK: torch.Tensor, *, out_THN: torch.Tensor) -> None:
        """Multiply the rows of each head by its weight, into `out_THN`; both may be parts of wider rows."""
        if self._kernels is None or weight_HNK not in self:
            out_THN.copy_(torch.bmm(x_THK.transpose(0, 1), weight_HNK.transpose(1, 2)).transpose(0, 1))
        else:
            self._kernels.linear_by_head(x_THK, weight_HNK, out_THN)

    def experts(
        self,
        x_TM: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        *,
        f32_output: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run every token through its experts; returns the output [T, M] and rows per expert [E].

        A choice with a negative id counts as nothing. The output has x's number type, or float32.
        """
        if self._kernels is None or w13 not in self:
            return cpu_experts.combined_experts(x_TM, w13, w2, topk_weights_TK, topk_ids_TK, f32_output=f32_output)
        done: tuple[torch.Tensor, torch.Tensor] = self._kernels.experts(
            x_TM if x_TM.stride(-1) == 1 else x_TM.contiguous(),
            w13,
            w2,
            topk_weights_TK.to(torch.float32).contiguous(),
            topk_ids_TK.to(torch.int32).contiguous(),
            f32_output=f32_output,
        )
        return done


def _packable(weight: torch.Tensor) -> bool:
    """What the kernels take: bf16 in pairs along the inputs, or float32; one contiguous piece of memory."""
    in_pairs = weight.dtype == torch.bfloat16 and weight.shape[-1] % 2 == 0
    return (in_pairs or weight.dtype == torch.float32) and weight.is_contiguous() and weight.device.type == "cpu"
