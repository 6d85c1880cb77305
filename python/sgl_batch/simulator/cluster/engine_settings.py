"""Owns what an engine is to the cost model: what it can do, and the assumed numbers of its kernels and its host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sgl_batch.planner.candidate import DEVICE
from sgl_batch.simulator.cluster.assumed import NOTHING, Assumed, assumed_of, variants
from sgl_batch.simulator.cluster.regime import EXPERT_PARALLEL

GATHER, ALL_TO_ALL = "gather", "all-to-all"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """An engine. All numbers of the type Assumed are guesses, beside which their ends stand.

    What it can do:
        name, title: "batchgen"; its name in reports.
        data_attention: Whether ranks have sequences of their own, with the whole of attention each.
        tensor_attention: Whether ranks may share every matrix instead.
        exchange: "gather" (all rows to all ranks, then sums are scattered), or "all-to-all" (rows to the ranks that
            have their experts).
        tensor_experts: Whether ranks have a slice of every expert instead of whole ones; no rank has more than others.
        kv, prefill, attention: The forms of each (regime.Regime) that it has.
        streams_weights: Whether experts may come from host memory.
        by_layer: Whether streamed weights are all of a layer, reached by rows or not, and attention's with them.
        chunk_tokens: Prompt tokens of a pass of one rank, at most.
        graph_rows: Sequences of a decode step of one rank up to which captured graphs launch it; 0 without graphs.
        mixed_graphs: Whether passes with prompts are launched by graphs as well.
        tile_rows: To a multiple of how many rows a kernel of experts rounds those of one expert up.
        padded_gather: Whether ranks send as many rows as the busiest one when they only decode.
        ragged_gather: By how much bytes of a gather grow where ranks have prompts of different sizes.
        dispatch_bytes: Of one number of a row that is sent to an expert, in an all-to-all.
        keeps_windows: Whether layers that attend a window keep the KV of all tokens; if not, that of the window alone.
        kernel_tables: The frameworks whose measured kernels stand for its own (kernel_tables), the first one first.

    What is assumed:
        reserve_bytes: Device memory that is neither weights nor KV: the process, workspaces, graphs, what a pass takes.
        ranks_reserve_bytes: What ranks with attention of their own take beside it for rows of others.
        host_reserve_bytes: Host memory of a node that is neither weights nor KV.
        step_s, step_row_s: Seconds of a pass beside its layers, for which the device waits, and of each sequence.
        agree_s: Seconds in which ranks agree on a pass.
        boundary_s, partition_s: Seconds of a boundary of all nodes, and of a change of the parallel form.
        layer_s: Seconds of a layer in which the device has no work: gaps between kernels.
        launch_s: Seconds in which the host launches a layer kernel by kernel; they hide behind the layer's work.
        expert_s: Seconds of each expert that is reached, beside its work.
        exchange_s: Seconds of one collective call beside its bytes.
        memory_share, copy_share, exchange_share: Of the bandwidths of device memory, the host link, and between GPUs.
        products_share, expert_share: Of the products that a large plain product reaches on the GPU, which other
            matrices and experts reach.
        attention_share: Of the products that long attention reaches on the GPU.
        corner: How far reading and products overlap where both take long: 1 where they take turns, and the larger it
            is, the nearer is their time together to the longer of both.
        row_passes: How often a layer reads or writes a row's hidden state beside its matrices, and `choice_passes` the
            row's copy of each choice of an expert.
        host_share: Of the host's bandwidth and products, for attention there.
        unevenness: Of the experts' popularity: the standard deviation of their rows, of the mean.
        overlap: The share of copies that runs behind the device's work, where there is enough of it.
    """

    name: str
    title: str
    reserve_bytes: Assumed
    ranks_reserve_bytes: Assumed
    host_reserve_bytes: Assumed
    step_s: Assumed
    step_row_s: Assumed
    agree_s: Assumed
    layer_s: Assumed
    launch_s: Assumed
    expert_s: Assumed
    exchange_s: Assumed
    memory_share: Assumed
    copy_share: Assumed
    exchange_share: Assumed
    products_share: Assumed
    expert_share: Assumed
    attention_share: Assumed
    corner: Assumed
    row_passes: Assumed
    choice_passes: Assumed
    host_share: Assumed
    unevenness: Assumed
    overlap: Assumed
    boundary_s: Assumed = NOTHING
    partition_s: Assumed = NOTHING
    data_attention: bool = True
    tensor_attention: bool = True
    exchange: str = GATHER
    tensor_experts: bool = False
    kv: tuple[str, ...] = (DEVICE,)
    prefill: tuple[str, ...] = (EXPERT_PARALLEL,)
    attention: tuple[str, ...] = (DEVICE,)
    streams_weights: bool = False
    by_layer: bool = False
    chunk_tokens: int = 8192
    graph_rows: int = 0
    mixed_graphs: bool = False
    tile_rows: int = 64
    padded_gather: bool = False
    ragged_gather: float = 1.0
    dispatch_bytes: float = 2.0
    keeps_windows: bool = True
    kernel_tables: tuple[str, ...] = ("sglang", "trtllm")

    def assumed(self) -> dict[str, Assumed]:
        """Return what is assumed, by field."""
        return assumed_of(self)

    def variants(self) -> Iterator[tuple[str, str, EngineSettings]]:
        """Yield the engine with one assumed number at one end each, with the number's name and the end."""
        yield from variants(self)
