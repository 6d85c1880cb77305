"""Owns having memory for the first forward passes given as an engine starts, on a CPU: scratch and large tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sgl_batch.byte_sizes import format_bytes
from sgl_batch.core.device_budget import pass_bytes
from sgl_batch.kernel_loader import native_kernels
from sgl_batch.memory.free_memory import free_bytes
from sgl_batch.model_executor.device_needs import model_shape
from sgl_batch.model_executor.model_runner import BatchModelRunner
from sgl_batch.model_executor.run_context import RunContext

# Of the start. A virtual machine gives what a group of some thousand prompt tokens takes in less.
_SECONDS_OF_START = 0.5
# Of the free memory and of the weights: an engine that gets few requests would not have taken it, see memory_ahead.
_SHARE_OF_FREE, _SHARE_OF_WEIGHTS = 64, 8


def reserve_first_passes(runner: BatchModelRunner, context: RunContext, *, free: Callable[[], int] = free_bytes) -> int:
    """Reserve memory for the first passes of a rank, with all threads, and return its bytes.

    0 beside a GPU, with streamed weights, which take what is free, and without the native kernels.
    """
    kernels = native_kernels()
    if runner.device != "cpu" or kernels is None or context.config.memory.weights != "resident":
        return 0
    plan = context.in_force.plan
    most_bytes = min(
        pass_bytes(
            model_shape(runner.model_config),
            rows=plan.prefill.b_moe,
            sequences=plan.decode.b_moe,
            b_attn=plan.prefill.b_attn,
        ),
        free() // _SHARE_OF_FREE // context.num_ranks,
        runner.weight_bytes // _SHARE_OF_WEIGHTS,
    )
    given: int = kernels.reserve_memory(most_bytes, _SECONDS_OF_START, torch.get_num_threads())
    context.start_log.end(f"memory for first passes taken, {format_bytes(given)}")
    return given
