"""Decides what of a GPU's budget is kept for what lies beside weights, pages of KV and a pass's tensors.

Pure arithmetic: what could be measured comes in as readings, the rest are reserves with names, which a refusal lists.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_batch.byte_sizes import format_bytes
from sgl_batch.errors import ConfigError

_MIB = 1 << 20
# CUDA's context with the kernels that torch and Triton load into it; no process can measure its own.
CONTEXT_BYTES = 768 * _MIB
# Of matrix products, for each stream that has some: that of the forward pass, of captures, and of a second group.
WORKSPACE_BYTES = 3 * 32 * _MIB
# Channels of NCCL, which are made when the ranks first meet.
EXCHANGE_BYTES = 512 * _MIB
# SGLang counts as much for each sequence of its largest decode graph.
GRAPH_ROW_BYTES = 2 * _MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """One look at this process's GPU. `free`: bytes that no process has; `held`: bytes that torch's allocator has."""

    free: int
    held: int
    processors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """What a rank will do on its GPU. `graph_rows`: sequences of SGLang's largest decode graph, 0 for none.

    `attention_row_bytes`: partial results of attention for one decoding sequence; `attention_workspace_bytes`: what the
    attention backend takes whatever the group is.
    """

    shares_gpu: bool
    exchanges: bool
    decode_rows: int
    graph_rows: int
    attention_row_bytes: int
    attention_workspace_bytes: int


def gpu_reserves(before: GpuReading, now: GpuReading, use: GpuUse) -> dict[str, int]:
    """Bytes by name, none of them 0. `before`: read before, `now`: after weights were loaded.

    What was taken in between and is not torch's are libraries' own buffers. Other processes' are counted with them
    where they came meanwhile; among ranks that share a GPU, that is not counted.
    """
    taken = 0 if use.shares_gpu else before.free - now.free - (now.held - before.held)
    # Graphs have partial results of their own, beside those of groups that run without.
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
    """Raise ConfigError where a budget is more than the GPU has free, in which this process's context lies already."""
    most = before.free + CONTEXT_BYTES
    if budget > most:
        raise ConfigError(
            f"device_memory is {format_bytes(budget)}, and the GPU has {format_bytes(most)} free: lower "
            "--device-memory, or end what else runs there"
        )
