"""Owns the expert runners of the conformance suite: how each is made and what each guarantees."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from sgl_batch.kernel_loader import native_kernels
from sgl_batch.layers.moe.clamped_experts import ClampedExperts
from sgl_batch.layers.moe.expert_runner import ExpertRunner, create_expert_runner
from sgl_batch.layers.packed_weights import PackedWeights

# Makes a runner for one layer's weights and, if it has them, its biases and clamped activation.
Prepare = Callable[[torch.Tensor, torch.Tensor, ClampedExperts | None], ExpertRunner]


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """The guarantees of a runner, besides a bound on its relative error for each number type.

    `own_bits`: the bits of a token's result do not depend on the other tokens. `tree_order`: a token's experts are
    added as a binary tree over their ids, so that the sums of 2 or 4 ranks give the bits of one. `rounds_once`: the
    output is the float32 one, rounded. `clamped`: it also computes experts with biases and a clamped activation.
    """

    error: dict[torch.dtype, float]
    own_bits: bool = True
    tree_order: bool = True
    rounds_once: bool = True
    clamped: bool = True


_EXACT = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
PROMISES = {
    "native": Promise(error=_EXACT),
    "triton": Promise(error=_EXACT),
    # These round to bfloat16 between their steps.
    "torch": Promise(error={torch.float32: 2e-6, torch.bfloat16: 1e-2}, own_bits=False, tree_order=False),
    "deepgemm": Promise(error={torch.bfloat16: 1e-2}, clamped=False),
    "sglang": Promise(
        error={torch.float32: 2e-6, torch.bfloat16: 1e-2}, own_bits=False, tree_order=False, rounds_once=False
    ),
}


def prepare_runner(name: str) -> Prepare:
    """Return the function that makes runners of this name."""
    if name == "native":
        return _native
    if name == "deepgemm" and not torch.cuda.is_available():
        sys.modules["deep_gemm"] = _stand_in_for_deepgemm()
    if name == "sglang":
        from sgl_batch.sglang_adapter.fused_moe import prepare_process

        prepare_process("none")
    runner = create_expert_runner(name)

    def prepare(w13: torch.Tensor, w2: torch.Tensor, clamped: ClampedExperts | None) -> ExpertRunner:
        def run(x_TM, _w13, _w2, weights_TK, ids_TK, *, f32_output=False):
            return runner(x_TM, w13, w2, weights_TK, ids_TK, f32_output=f32_output, clamped=clamped)

        return run

    return prepare


def _native(w13: torch.Tensor, w2: torch.Tensor, clamped: ClampedExperts | None) -> ExpertRunner:
    """Make a native runner with copies of the weights, which it packs in place."""
    packed, own13, own2 = PackedWeights(native_kernels()), w13.clone(), w2.clone()
    assert packed.add_experts(own13, own2, clamped=clamped is not None), "the native kernels take these weights"

    def run(x_TM, _w13, _w2, weights_TK, ids_TK, *, f32_output=False):
        return packed.experts(x_TM, own13, own2, weights_TK, ids_TK, f32_output=f32_output, clamped=clamped)

    return run


def _stand_in_for_deepgemm() -> ModuleType:
    """Return the grouped GEMM that DeepGEMM documents, for machines without a GPU, to test the arguments it gets."""

    def m_grouped_bf16_gemm_nt_contiguous(a, b, d, grouped_layout):
        assert {a.dtype, b.dtype, d.dtype} == {torch.bfloat16}, "operands are bfloat16"
        assert a.is_contiguous(), "rows are contiguous"
        assert b.is_contiguous(), "weights are contiguous"
        assert d.is_contiguous(), "the output is contiguous"
        assert grouped_layout.dtype == torch.int32, "groups are int32"
        assert grouped_layout.shape == (len(a),), "each row has its group"
        assert len(a) % 128 == 0, "groups end at multiples of 128 rows"
        by_block = grouped_layout.view(-1, 128)
        assert (by_block == by_block[:, :1]).all(), "128 rows are of one group"
        d.fill_(float("nan"))
        for group in grouped_layout.unique().tolist():
            rows = grouped_layout == group if group >= 0 else slice(0)
            d[rows] = (a[rows].float() @ b[group].float().T).to(torch.bfloat16)

    module = ModuleType("deep_gemm")
    module.m_grouped_bf16_gemm_nt_contiguous = m_grouped_bf16_gemm_nt_contiguous
    return module
