"""Adapts SGLang's forward batch, forward context and model runner for our model executor.

SGLang computes a forward batch whole; ours cuts it into sub-batches, and runs it over memory that graphs have captured.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.host_copies import upload
from sgl_batch.sglang_adapter.names import CPU_ATTENTION
from sgl_batch.sglang_adapter.types.batches import ForwardBatch, ScheduleBatch
from sgl_batch.sglang_adapter.types.messages import TensorsUpdate
from sgl_batch.sglang_adapter.types.scheduler import SGLangScheduler

with bootstrap.importing():
    import torch
    from sglang.srt.managers.overlap_utils import resolve_forward_inputs
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.model_executor.cuda_graph_config import Backend
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch as SGLangForwardBatch
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    from sglang.srt.model_executor.model_runner import ModelRunner, ModelRunnerOutput
    from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode

__all__ = [
    "DEVICE_METADATA_BACKENDS",
    "REENTRANT_BACKENDS",
    "ForwardContext",
    "ModelRunner",
    "ModelRunnerOutput",
    "TpModelWorker",
    "decode_batch_over",
    "decode_slice",
    "extend_slice",
    "forward_batch_of",
    "forward_context",
    "graphs_wanted",
    "is_greedy",
    "keep_tensors_for",
    "model_capture_mode",
    "set_model_runner",
]

# Backends whose metadata of a batch is one value in `forward_metadata`, so that the metadata of several sub-batches can
# be made first and swapped later. Other backends keep shared workspaces, and run a group as one sub-batch. Each of
# these also writes the KV of all rows before it attends, so that a prompt may read pages that another prompt of the
# batch computes.
REENTRANT_BACKENDS = frozenset({CPU_ATTENTION, "torch_native", "triton", "fa3"})

# Those of them that make the metadata of a decode batch without its lengths on the host (`seq_lens_cpu` is None), as a
# graph needs it.
DEVICE_METADATA_BACKENDS = frozenset({"triton", "fa3"})


def graphs_wanted(server_args: Any) -> bool:
    """Return whether SGLang's arguments allow CUDA graphs for decode."""
    return bool(server_args.cuda_graph_config.decode.backend != Backend.DISABLED)


def decode_graph_rows(server_args: Any) -> int:
    """Return the sequences of the largest decode group for which SGLang captures a graph; 0 if it captures none."""
    return int(server_args.cuda_graph_config.decode.max_bs or 0) if graphs_wanted(server_args) else 0


def is_greedy(forward_batch: ForwardBatch) -> bool:
    """Return whether all sequences of the batch take the most likely token and need nothing else of their logits."""
    sampling = forward_batch.sampling_info
    return sampling is not None and bool(sampling.is_all_greedy) and not forward_batch.return_logprob


def forward_batch_of(scheduler: SGLangScheduler, batch: ScheduleBatch, runner: object) -> ForwardBatch:
    """Make the forward batch of a scheduler's batch. It may be made several times."""
    resolve_forward_inputs(batch, scheduler.future_map)
    made: ForwardBatch = SGLangForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)
    return made


def _slice(forward_batch: ForwardBatch, rows: slice, **fields: Any) -> ForwardBatch:
    part = copy.copy(forward_batch)
    part.input_ids = forward_batch.input_ids[rows]
    part.positions = forward_batch.positions[rows]
    part.out_cache_loc = forward_batch.out_cache_loc[rows]
    part.num_token_non_padded = None
    part.sampling_info = None
    lengths = fields["seq_lens_cpu"]
    part.seq_lens_sum = None if lengths is None else int(lengths.sum())
    part.batch_size = len(fields["seq_lens"])
    for name, value in fields.items():
        setattr(part, name, value)
    return part


def decode_slice(forward_batch: ForwardBatch, start: int, end: int) -> ForwardBatch:
    """Return the sequences [start, end) of a decode batch as a forward batch of their own."""
    rows = slice(start, end)
    lengths = forward_batch.seq_lens_cpu
    return _slice(
        forward_batch,
        rows,
        req_pool_indices=forward_batch.req_pool_indices[rows],
        seq_lens=forward_batch.seq_lens[rows],
        seq_lens_cpu=None if lengths is None else lengths[rows],
        orig_seq_lens=forward_batch.orig_seq_lens[rows],
        rids=forward_batch.rids and forward_batch.rids[rows],
    )


def decode_batch_over(forward_batch: ForwardBatch, rows: Mapping[str, torch.Tensor]) -> ForwardBatch:
    """Return a decode batch like this one over other memory: `rows` has its tensors by name, a row for each sequence.

    It has neither lengths nor request ids on the host, because the memory's contents change from pass to pass.
    """
    other = copy.copy(forward_batch)
    for name, tensor in rows.items():
        setattr(other, name, tensor)
    other.batch_size = len(rows["input_ids"])
    other.seq_lens_cpu = other.seq_lens_sum = other.num_token_non_padded = other.sampling_info = other.rids = None
    return other


def extend_slice(
    forward_batch: ForwardBatch,
    start: int,
    end: int,
    sequences: list[int],
    prefix_lens: list[int],
    extend_lens: list[int],
) -> ForwardBatch:
    """Return rows [start, end) of an extend batch as a forward batch of their own.

    The rows are pieces of `sequences`: `prefix_lens` tokens of each come before its piece, which has `extend_lens`.
    """
    device = forward_batch.seq_lens.device
    index, prefix, extend = (upload(one, torch.int64, device) for one in (sequences, prefix_lens, extend_lens))
    return _slice(
        forward_batch,
        slice(start, end),
        req_pool_indices=forward_batch.req_pool_indices[index],
        seq_lens=prefix + extend,
        seq_lens_cpu=torch.tensor(prefix_lens) + torch.tensor(extend_lens),
        orig_seq_lens=forward_batch.orig_seq_lens[index],
        rids=forward_batch.rids and [forward_batch.rids[number] for number in sequences],
        extend_num_tokens=end - start,
        extend_prefix_lens=prefix,
        extend_prefix_lens_cpu=prefix_lens,
        extend_seq_lens=extend,
        extend_seq_lens_cpu=extend_lens,
        extend_start_loc=torch.cumsum(extend, 0) - extend,
    )


def set_model_runner(worker: Any, runner: Any) -> None:
    """Set the model runner that SGLang's worker drives."""
    worker._model_runner = runner


def keep_tensors_for(update: TensorsUpdate, rank: int) -> None:
    """Keep one rank's tensors of an update that has those of every rank, at the index that SGLang reads.

    An update with one item is for all ranks.
    """
    sent = update.serialized_named_tensors
    update.serialized_named_tensors = sent if len(sent) == 1 else [sent[rank]]
