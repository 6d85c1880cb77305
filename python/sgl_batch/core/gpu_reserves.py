"""Decides how much of a GPU's budget is reserved for memory other than weights, KV pages and a pass's tensors.

Pure arithmetic. Memory that can be measured is passed in as readings; the rest are named reserves, which the error
message of a budget that is too small lists.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_batch.byte_sizes import format_bytes
from sgl_batch.errors import ConfigError

_MIB = 1 << 20
# CUDA's context with the kernels that torch and Triton load; a process cannot measure its own.
CONTEXT_BYTES = 768 * _MIB
# Workspaces of matrix products, one per stream that computes some: the forward pass, captures, and a second group.
WORKSPACE_BYTES = 3 * 32 * _MIB
# Channels of NCCL, which it makes when ranks first communicate.
EXCHANGE_BYTES = 512 * _MIB
# For each sequence of SGLang's largest decode graph, as SGLang itself estimates.
GRAPH_ROW_BYTES = 2 * _MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """One reading of this process's GPU.

    free: bytes that no process holds.
    held: bytes that torch's allocator holds.
    processors: number of streaming multiprocessors.
    """

    free: int
    held: int
    processors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """How a rank will use its GPU.

    shares_gpu: whether other ranks use the same GPU.
    exchanges: whether it exchanges tokens with other ranks.
    decode_rows: the most sequences of a decode step.
    graph_rows: sequences of SGLang's largest decode graph; 0 for none.
    attention_row_bytes: partial results of attention for one decoding sequence.
    attention_workspace_bytes: what the attention backend takes whatever the group is.
    """

    shares_gpu: bool
    exchanges: bool
    decode_rows: int
    graph_rows: int
    attention_row_bytes: int
    attention_workspace_bytes: int


def gpu_reserves(before: GpuReading, now: GpuReading, use: GpuUse) -> dict[str, int]:
    """Return the reserves in bytes by name, without those that are 0.

    `before`: a reading before weights were loaded, `now`: after. Memory that was taken in between and is not torch's
    counts as libraries' own buffers. That includes memory of other processes that started meanwhile; it is not counted
    among ranks that share a GPU.
    """
    taken = 0 if use.shares_gpu else before.free - now.free - (now.held - before.held)
    # Graphs have partial results of their own, besides those of groups that run without graphs.
    attention = (use.decode_rows + use.graph_rows) * use.attention_row_bytes + use.attention_workspace_bytes
    reserves = {
        "CUDA's context": CONTEXT_BYTES,
        "libraries": max(taken, 0),
        "workspaces of matrix products": WORKSPACE_BYTES,
        "decode graphs": use.graph_rows * GRAPH_ROW_BYTES,
        "partial results of attention": attention,
        "exchange between ranks": EXCHANGE_BYTES if use.exchanges else 0,
    }
    return {name: num_bytes for name, num_bytes in reserves.items() if num_bytes}


def check_gpu_has(budget: int, before: GpuReading) -> None:
    """Raise ConfigError if a budget is more than the GPU has free, counting this process's context as free."""
    most = before.free + CONTEXT_BYTES
    if budget > most:
        raise ConfigError(
            f"device_memory is {format_bytes(budget)}, and the GPU has {format_bytes(most)} free: lower "
            "--device-memory, or end other programs that use the GPU"
        )
