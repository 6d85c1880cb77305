"""Decode steps of a model as a GPU runs them, and the operations of each that would make the host wait for that GPU.

They run on a CPU, with SGLang's Triton attention under Triton's interpreter: SGLang's batches, their forward passes and
sampling, without an engine.
"""

from __future__ import annotations

import array
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from interpreter import TRITON
from loaded_models import load_worker

from sgl_batch.core.graph_capture import PASSES_BEFORE_CAPTURE
from sgl_batch.layers import counter_sampler
from sgl_batch.layers.counter_sampler import CounterSampler
from sgl_batch.metrics.counters import Counters
from sgl_batch.model_executor.layer_graphs import LayerGraphs
from sgl_batch.sglang_adapter.scheduling import decode_batch, merge_into, prefill_batch
from sgl_batch.sglang_adapter.triton_attention import register_triton_attention

sys.path.append(str(Path(__file__).parents[1]))
from host_syncs import HostSyncs
from rerunning_graphs import RerunningGraphs

# The second sequence opens a page in the first decode step.
LENGTHS = (5, 16, 9, 3)
SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.9},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.9, "top_k": 5, "min_p": 0.05},
    {"temperature": 0},
)


class Steps:
    """The scheduler's part of a step: `begin` prefills sequences, `step` makes one decode step of them."""

    def __init__(self, worker: Any) -> None:
        from sglang.srt.managers.overlap_utils import FutureMap
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.chunk_cache import ChunkCache
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        self._worker, runner = worker, worker.model_runner
        runner.sampler = CounterSampler()
        pool, allocator = worker.get_memory_pool()
        cache = CacheInitParams(
            disable=True, req_to_token_pool=pool, token_to_kv_pool_allocator=allocator, page_size=runner.page_size
        )
        self._scheduler: Any = SimpleNamespace(
            req_to_token_pool=pool,
            token_to_kv_pool_allocator=allocator,
            tree_cache=ChunkCache(cache),
            model_config=worker.model_config,
            spec_algorithm=SpeculativeAlgorithm.NONE,
            future_map=FutureMap(runner.device, SpeculativeAlgorithm.NONE, pool),
            running_batch=SimpleNamespace(reqs=[]),
        )
        self._batch: Any = None

    def begin(self, parameters: tuple[dict[str, Any], ...]) -> None:
        """Prefill one sequence for each of these sampling parameters."""
        requests = [self._request(index, given) for index, given in enumerate(parameters)]
        batch = prefill_batch(self._scheduler, requests, {})
        self._launch(batch)
        parts = [decode_batch(self._scheduler, requests[:2]), decode_batch(self._scheduler, requests[2:])]
        self._batch = merge_into(*parts)

    def step(self) -> None:
        """Make one decode step, until its tokens are on the host."""
        self._batch.prepare_for_decode()
        self._launch(self._batch)

    def _request(self, index: int, given: dict[str, Any]) -> Any:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        parameters = SamplingParams(**given, sampling_seed=7 + index, max_new_tokens=20, ignore_eos=True)
        parameters.normalize(None)
        ids = array.array("q", range(10, 10 + LENGTHS[index]))
        return Req(f"{index}", "", ids, parameters, vocab_size=self._worker.model_config.vocab_size)

    def _launch(self, batch: Any) -> None:
        from sglang.srt.managers.overlap_utils import RelayPayload, resolve_forward_inputs

        future_map = self._scheduler.future_map
        resolve_forward_inputs(batch, future_map)
        result = self._worker.forward_batch_generation(batch)
        future_map.stash(batch.req_pool_indices, RelayPayload(bonus_tokens=result.next_token_ids))
        batch.input_ids = None
        for request, token in zip(batch.reqs, result.next_token_ids.tolist(), strict=True):
            request.output_ids.append(token)


def _capture_next_step(runner: Any) -> None:
    """Make the next decode step capture a graph with rows for two more sequences."""
    layer_graphs = LayerGraphs(
        graphs=RerunningGraphs(),
        counters=Counters(),
        budget_bytes=1 << 30,
        most_rows=len(LENGTHS) + 2,
        pool_tokens=runner.max_total_num_tokens,
        hidden_size=runner.model_config.hidden_size,
        dtype=runner.model_config.dtype,
    )
    layer_graphs.begin_anew(runner.context.in_force.plan.decode)
    for _ in range(PASSES_BEFORE_CAPTURE - 1):
        assert layer_graphs.captures.size_for(len(LENGTHS), len(LENGTHS) + 2) is None
    runner.layer_runner.layer_graphs = layer_graphs


def _plant_host_sync(runner: Any) -> None:
    """Make each layer read a value of its attention's input on the host, as careless code would. Removes the graph."""
    assert runner.layer_runner.layer_graphs.inputs is not None, "the step before was captured"
    runner.layer_runner.layer_graphs = None
    family = runner.layer_runner.family
    attend = type(family).attention_half

    def looking(layer: Any, positions: Any, hidden: torch.Tensor, *others: Any) -> Any:
        assert hidden.abs().max().item() > 0
        return attend(family, layer, positions, hidden, *others)

    object.__setattr__(family, "attention_half", looking)


@torch.no_grad()
def run_counted(directory: Path, model: str) -> None:
    """Print the counts of a prefill, of a decode step, of one that is captured as a graph, and of one whose layers each
    read a number on the host. A step that waited inside could not be captured.
    """
    register_triton_attention()
    counter_sampler.native_kernels = lambda: None  # tokens are sampled as on a GPU
    flags = {**TRITON, "triton_attention_num_kv_splits": 1}
    worker = load_worker(model, "float32", directory, sglang=flags, b_attn_decode=3, b_attn_prefill=64)
    steps, counted = Steps(worker), []
    with HostSyncs() as syncs:
        runner = worker.model_runner
        for work in (
            lambda: steps.begin(SAMPLED),
            steps.step,
            lambda: _capture_next_step(runner),
            steps.step,
            lambda: _plant_host_sync(runner),
            steps.step,
        ):
            work()
            counted.append([[sync.where, sync.kind, times] for sync, times in sorted(syncs.take().items())])
    sys.stdout.write(json.dumps({"syncs": counted}) + "\n")
    sys.stdout.flush()
