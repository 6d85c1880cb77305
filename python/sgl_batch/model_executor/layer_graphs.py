"""Owns the decode passes that run as captured graphs: one launch for all layers, instead of one for each kernel.

core/graph_capture decides which sizes are captured, and when. A graph records layer_runner's own loop over sub-batches
and layers, on rows at fixed addresses that are padded to the size. Attention makes its metadata inside the graph, from
lengths and page tables on the device.

This has not run on a GPU yet. It is tested on a CPU, with graphs that run their work anew on the same memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from sgl_batch.core.graph_capture import Captures
from sgl_batch.core.plan import PhasePlan, row_spans
from sgl_batch.metrics.counters import Counters
from sgl_batch.model_executor.cuda_graphs import CaptureError, Graphs
from sgl_batch.model_executor.graph_inputs import GraphInputs
from sgl_batch.sglang_adapter.types.batches import ForwardBatch

logger = logging.getLogger(__name__)

Compute = Callable[[ForwardBatch], torch.Tensor]
"""The work that is captured: a decode batch's pass, which returns hidden states [rows, hidden_size] after the last
norm.
"""


class LayerGraphs:
    """The graphs of one model, one for each padded size of a decode group, and the memory that they read and write.

    `most_rows`: sequences of the largest group; `pool_tokens`: that the KV pool holds; `budget_bytes`: device memory
    for all. Graphs hold for the limits of one plan: other limits cut sub-batches elsewhere, and graphs are captured
    anew. Weights and KV stay where they were at a capture, as SGLang's own graphs need it: an update of weights
    overwrites them.
    """

    def __init__(
        self,
        *,
        graphs: Graphs,
        counters: Counters,
        budget_bytes: int,
        most_rows: int,
        pool_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        self.captures = Captures(budget_bytes)
        self.inputs: GraphInputs | None = None
        self._graphs, self._counters = graphs, counters
        self._most_rows, self._pool_tokens = most_rows, pool_tokens
        self._hidden_size, self._dtype = hidden_size, dtype
        self._limits: PhasePlan | None = None
        self._replays: dict[int, Callable[[], None]] = {}

    def run(self, forward_batch: ForwardBatch, limits: PhasePlan, compute: Compute) -> torch.Tensor | None:
        """Run a decode group's pass as a graph; return its hidden states [rows, hidden_size], which are the caller's.

        None if the caller must run the pass eagerly. `compute` runs it, and is called to capture a graph.
        """
        if limits != self._limits:
            self.begin_anew(limits)
        num_rows, most = forward_batch.batch_size, min(limits.b_moe, self._most_rows)
        if num_rows > most or self._most_attended_tokens(forward_batch, limits) > self._pool_tokens:
            return None
        size = self.captures.size_for(num_rows, most)
        if size is None:
            return None
        inputs = self._lay_out(forward_batch)
        inputs.load(forward_batch, size)
        self._replay_or_capture(size, inputs, forward_batch, compute)
        # The next pass overwrites it.
        return inputs.hidden[:num_rows].clone()

    def _replay_or_capture(self, size: int, inputs: GraphInputs, forward_batch: ForwardBatch, compute: Compute) -> None:
        replay = self._replays.get(size)
        if replay is not None:
            replay()
            self._counters.add("graph_replays")
            return
        batch = inputs.batch(forward_batch, size)

        def work() -> None:
            inputs.hidden[:size].copy_(compute(batch))

        try:
            captured = self._graphs.capture(work)
        except CaptureError as error:
            logger.warning(
                "a decode step cannot be captured as a CUDA graph (%s): sizes that are not captured yet run eagerly",
                error,
            )
            self.captures.stop()
            return
        self._replays[size] = captured.replay
        self.captures.add(size, captured.num_bytes)
        self._counters.add("graphs_captured")
        self._counters.add("graph_bytes", captured.num_bytes)

    def begin_anew(self, limits: PhasePlan) -> None:
        """Use these limits for groups from now on, and free the graphs that were captured with others."""
        if self._replays:
            logger.info("groups have other limits: decode steps are captured anew as CUDA graphs")
            self._replays.clear()
            self._graphs.release()
        self._counters.add("graph_bytes", -self.captures.forget())
        self._limits = limits

    def _lay_out(self, forward_batch: ForwardBatch) -> GraphInputs:
        """Return the graphs' memory; it is allocated when a pass first needs it."""
        if self.inputs is None:
            self.inputs = GraphInputs(self._most_rows, forward_batch, self._hidden_size, self._dtype)
            self.captures.spend(self.inputs.num_bytes)
            self._counters.add("graph_bytes", self.inputs.num_bytes)
        return self.inputs

    def _most_attended_tokens(self, forward_batch: ForwardBatch, limits: PhasePlan) -> int:
        """Return the most tokens that one sub-batch attends to. A page that sequences share counts for each of them."""
        lengths = forward_batch.seq_lens_cpu
        assert lengths is not None, "a pass's batch has its lengths on the host"
        return max(int(lengths[start:end].sum()) for start, end in row_spans(len(lengths), limits.b_attn))
