"""Owns the contracts of an expert call and of an expert runner, which runners there are and what each needs.

It does not decide which runner computes. A *runner* gets a layer's matrices; a *call* gets the layer, and finds its
matrices and its runner. Shape suffixes: T or R rows, K experts per row, E experts, M hidden, I intermediate.
"""

from __future__ import annotations

import importlib.util
from typing import Protocol

import torch

from sgl_batch.errors import ConfigError
from sgl_batch.kernel_loader import native_kernels
from sgl_batch.layers.moe.clamped_experts import ClampedExperts
from sgl_batch.sglang_adapter.types.models import ExpertLayer, ExpertOptions

# Runners for weights as they are loaded, by where they run. `native` (on a CPU) packs weights first: `PackedWeights`.
ON_CPU = ("native", "torch", "triton")
ON_GPU = ("sglang", "triton", "deepgemm", "torch")


def installed_on_gpu(dtype: torch.dtype, *, clamped: bool = False) -> tuple[str, ...]:
    """Return the runners for a GPU that are installed and take weights of this number type; SGLang's own is first.

    `clamped`: the experts have biases and a clamped activation.
    """
    names = ["sglang"]
    if _is_there("triton"):
        names.append("triton")
        if dtype == torch.bfloat16 and not clamped and _is_there("deep_gemm"):
            names.append("deepgemm")
    return tuple(names)


def _is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


class ExpertRunner(Protocol):
    """Computes one layer's experts for a combined batch, from the layer's matrices.

    An expert computes down(SiLU(gate(x)) * up(x)), or what `clamped` describes. The outputs of a row's experts are
    multiplied by their weights and added up. With the runners native and triton, a row's result has the same bits
    whatever the other rows and their number.

    Args:
        x_TM: Rows in the model's number type, on the weights' device. They are only read.
        w13: [E, 2I, M], the rows of gate above those of up. With `clamped` they alternate. A runner of packed or
            streamed weights knows the layer by this tensor and does not read its data as they lie.
        w2: [E, M, I].
        topk_weights_TK: float32, the factor of each choice.
        topk_ids_TK: int32 or int64, ids of these E experts. A negative id is no choice and adds nothing.
        f32_output: Whether the output is float32 and not x's number type.
        clamped: Biases and activation of experts that have them. A runner that cannot compute them raises ConfigError.

    Returns:
        The output [T, M], 0 in a row without a choice, and the number of rows of each expert [E], int64. Both are new
        tensors and the caller's.
    """

    def __call__(
        self,
        x_TM: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        *,
        f32_output: bool = False,
        clamped: ClampedExperts | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class ExpertCall(Protocol):
    """Computes the experts that this rank holds of one layer, for rows that are routed already.

    Args:
        layer: SGLang's layer of experts. Its weights must be loaded, and of a form that `check_experts` accepts.
        x_RM: Rows in the model's number type, each contiguous. The output may be written over them: the caller passes
            a copy if it reads them afterwards.
        topk_weights_RK: float32, the factor of each choice.
        topk_ids_RK: int32, ids of this rank's experts, from 0. -1 is a choice of another rank's expert, or of none.
        f32_output: Whether the output is float32, as the sum over ranks needs it, and not x's number type.

    Returns:
        What these experts add to each row [R, M], 0 in a row without a choice of this rank's. It is the caller's.
    """

    def __call__(
        self,
        layer: ExpertLayer,
        x_RM: torch.Tensor,
        topk_weights_RK: torch.Tensor,
        topk_ids_RK: torch.Tensor,
        *,
        f32_output: bool = False,
    ) -> torch.Tensor: ...


def check_runner(name: str, *, on_cpu: bool) -> None:
    """Raise ConfigError for a runner that cannot run on the device or needs a package that is not installed."""
    known = ON_CPU if on_cpu else ON_GPU
    if name not in ("auto", *known):
        raise ConfigError(
            f"expert_runner is {name!r}, which does not run on a {'CPU' if on_cpu else 'GPU'}; choose auto, "
            f"{', '.join(known)}"
        )
    if name == "native" and native_kernels() is None:
        raise ConfigError("expert_runner is 'native', and the native kernels are not there: run scripts/install")
    if name in ("triton", "deepgemm") and not _is_there("triton"):
        raise ConfigError(f"expert_runner is {name!r}, and the package triton is not installed; choose another")
    if name == "triton" and on_cpu and not _interprets():
        raise ConfigError(
            "expert_runner is 'triton', which runs on a CPU by Triton's interpreter alone, hundreds of times slower: "
            "choose native, or set TRITON_INTERPRET=1 to try it"
        )


def check_experts(config: ExpertOptions) -> None:
    """Raise ConfigError for options of a layer that none of our runners computes (invariant 3)."""
    if config.activation != "silu" or config.apply_router_weight_on_input:
        raise ConfigError(
            f"experts use SiLU and weight their output here; this model asks for activation="
            f"{config.activation!r}, apply_router_weight_on_input={config.apply_router_weight_on_input}"
        )


def _interprets() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


def create_expert_runner(name: str) -> ExpertRunner:
    """Return the runner of a name, for weights as they are loaded. Raises ConfigError if a package is missing."""
    if name == "triton":
        from sgl_batch.layers.moe.triton_experts import triton_experts

        return triton_experts
    if name == "deepgemm":
        from sgl_batch.layers.moe.deepgemm_experts import deepgemm_experts

        return deepgemm_experts
    if name == "sglang":
        from sgl_batch.sglang_adapter.fused_moe import sglang_experts

        return sglang_experts
    assert name == "torch", f"no expert runner for plain weights is called {name!r}"
    from sgl_batch.layers.moe.cpu_experts import combined_experts

    return combined_experts
