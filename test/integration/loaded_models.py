"""Owns a model runner in this process, without scheduler or engine: forward passes over batches that a test makes.

SGLang keeps its state in globals, so each model needs a process of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sgl_batch.config import from_mapping
from sgl_batch.core.plan_in_force import PlanInForce
from sgl_batch.distributed.rank_context import RankContext
from sgl_batch.distributed.rendezvous import Rendezvous
from sgl_batch.engine.engine import make_server_args
from sgl_batch.managers.tp_worker import BatchTpWorker
from sgl_batch.metrics.counters import Counters
from sgl_batch.model_executor.cpu_operators import CpuOperators
from sgl_batch.model_executor.run_context import RunContext
from sgl_batch.sglang_adapter.forward import ForwardContext, forward_context

PAGE, PAGES = 16, 512


def load(model: str, dtype: str, directory: Path, *, rank_context: RankContext | None = None, **ours: Any) -> Any:
    """Return the `BatchModelRunner` of a model. `ours`: flags of sgl_batch; `rank_context`: of one of several ranks."""
    return load_worker(model, dtype, directory, rank_context=rank_context, **ours).model_runner


def load_worker(
    model: str,
    dtype: str,
    directory: Path,
    *,
    sglang: Mapping[str, Any] | None = None,
    rank_context: RankContext | None = None,
    **ours: Any,
) -> BatchTpWorker:
    """Return the worker of a model. `ours`: flags of sgl_batch; `sglang`: flags of SGLang."""
    from sglang.srt.distributed.parallel_state_wrapper import ParallelState
    from sglang.srt.server_args import set_global_server_args_for_scheduler

    config, counters = from_mapping(ours), Counters()
    wanted: dict[str, Any] = {"model_path": model, "dtype": dtype, "device": "cpu", "page_size": PAGE}
    wanted |= {"log_level": "error", "max_total_tokens": PAGES * PAGE, "skip_tokenizer_init": True, **(sglang or {})}
    server_args = make_server_args(wanted, config)
    set_global_server_args_for_scheduler(server_args)
    operators = CpuOperators(counters, config.forward)
    operators.register()
    context = RunContext(
        in_force=PlanInForce(config),
        counters=counters,
        cpu_operators=operators,
        rendezvous=Rendezvous(directory),
        rank_context=rank_context,
    )
    parallel_state = ParallelState.trivial(gpu_id=0)
    worker = BatchTpWorker(context=context, server_args=server_args, gpu_id=0, ps=parallel_state, nccl_port=0)
    worker.alloc_memory_pool()
    worker.init_attention_backends()
    worker.init_cuda_graphs()
    return worker


def forward_parts(runner: Any, batches: Sequence[Any]) -> list[Any]:
    """Run one pass over these batches and return the result of each."""
    with forward_context(ForwardContext(attn_backend=runner.attn_backend)):
        answers: list[Any] = runner.layer_runner.forward_parts(batches)
        return answers


def kv_indices_of(pages: Sequence[int]) -> torch.Tensor:
    """Return the KV indices of whole pages, one page after the other."""
    return (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).flatten()


def extend_batch(runner: Any, rows: Sequence[int], prefixes: Sequence[int], ids: Sequence[Sequence[int]]) -> Any:
    """Return a prefill of `ids` after `prefixes` tokens, of the sequences in request slots `rows`."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    lengths = [len(one) for one in ids]
    ends = [prefix + length for prefix, length in zip(prefixes, lengths, strict=True)]
    batch = _batch(runner, ForwardMode.EXTEND, rows, prefixes, ends, [token for one in ids for token in one])
    batch.extend_num_tokens = sum(lengths)
    batch.extend_prefix_lens, batch.extend_prefix_lens_cpu = torch.tensor(prefixes), list(prefixes)
    batch.extend_seq_lens, batch.extend_seq_lens_cpu = torch.tensor(lengths), lengths
    batch.extend_start_loc = torch.cumsum(batch.extend_seq_lens, 0) - batch.extend_seq_lens
    return batch


def decode_batch(runner: Any, rows: Sequence[int], lengths: Sequence[int], ids: Sequence[int]) -> Any:
    """Return a decode step of sequences that are `lengths` long without the new tokens `ids`."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return _batch(runner, ForwardMode.DECODE, rows, lengths, [length + 1 for length in lengths], ids)


def _batch(
    runner: Any, mode: Any, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int], ids: Sequence[int]
) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    table, ranges = runner.req_to_token_pool.req_to_token, list(zip(rows, starts, ends, strict=True))
    batch = ForwardBatch(
        forward_mode=mode,
        batch_size=len(rows),
        input_ids=torch.tensor(ids),
        req_pool_indices=torch.tensor(rows),
        seq_lens=torch.tensor(ends),
        seq_lens_cpu=torch.tensor(ends),
        orig_seq_lens=torch.tensor(ends, dtype=torch.int32),
        out_cache_loc=torch.cat([table[row, start:end] for row, start, end in ranges]).to(torch.int64),
        seq_lens_sum=sum(ends),
    )
    batch.positions = torch.cat([torch.arange(start, end) for _, start, end in ranges])
    return batch
