"""Owns the types of SGLang's batches: the scheduler's batch, the batch of a forward pass, and a pass's results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from sgl_batch.sglang_adapter.types.requests import Request


class ForwardMode(Protocol):
    """The kind of a batch."""

    def is_decode(self) -> bool:
        """Return whether it computes one token of each sequence."""

    def is_extend(self) -> bool:
        """Return whether it computes prompts, or pieces of them."""

    def is_cuda_graph(self) -> bool:
        """Return whether SGLang can capture graphs of it."""


class Penalties(Protocol):
    """The penalties of a batch's rows (SGLang's BatchedPenalizerOrchestrator)."""

    is_required: bool
    penalizers: dict[type, object]

    def cumulate_output_tokens(self, output_ids: torch.Tensor) -> None:
        """Count one token of each sequence: [B], int64."""


class SamplingInfo(Protocol):
    """The sampling parameters of a batch, row by row (SGLang's SamplingBatchInfo)."""

    is_all_greedy: bool
    sampling_seed: torch.Tensor | None
    """[B], int64; None if SGLang draws from its own generator."""

    penalizer_orchestrator: Penalties


class ScheduleBatch(Protocol):
    """A batch of the scheduler: a prefill group or the decode batch. B is the number of its requests."""

    reqs: list[Request]
    forward_mode: ForwardMode
    device: str
    sampling_info: SamplingInfo
    return_logprob: bool
    return_hidden_states: bool
    top_logprobs_nums: list[int] | None
    token_ids_logprobs: list[list[int] | None] | None
    multimodal_inputs: list[object] | None
    prefill_stats: object

    prefix_lens: list[int]
    """[B] of a prefill: how many tokens of each request are computed already."""

    extend_lens: list[int]
    """[B] of a prefill: how many tokens of each it computes."""

    extend_num_tokens: int
    """Their sum."""

    req_pool_indices: torch.Tensor
    """Request slots [B], int64."""

    req_pool_indices_cpu: torch.Tensor
    seq_lens: torch.Tensor
    """Tokens with KV [B], int64."""

    seq_lens_cpu: torch.Tensor
    orig_seq_lens: torch.Tensor
    """The same [B], int32."""

    seq_lens_sum: int | None
    """Their sum; None until a pass needs it."""

    input_ids: torch.Tensor | None
    """The tokens of the next pass [T], int64; None where they are in the relay of the last step."""

    out_cache_loc: torch.Tensor
    """KV indices of the tokens of the next pass [T], int64."""

    def is_empty(self) -> bool:
        """Return whether it has no requests."""

    def prepare_for_extend(self) -> None:
        """Allocate KV indices for the tokens of a prefill, and make its tensors."""

    def prepare_for_decode(self) -> None:
        """Allocate a KV index for the next token of each sequence, and make the step's tensors."""

    def filter_batch(self, *, keep_indices: list[int] | None = None) -> None:
        """Keep the requests at these indices; without indices, the requests that have not ended."""

    def merge_batch(self, other: ScheduleBatch) -> None:
        """Add the requests of another decode batch after its own."""

    def copy(self) -> ScheduleBatch:
        """Copy what the processing of results needs."""


class LogitsOutput(Protocol):
    """The output of the model's head (SGLang's LogitsProcessorOutput)."""

    next_token_logits: torch.Tensor | None
    """[B, vocabulary]."""


class BatchResult(Protocol):
    """The results of a pass (SGLang's GenerationBatchResult)."""

    logits_output: LogitsOutput
    next_token_ids: torch.Tensor
    """The sampled tokens [B], int64."""

    copy_done: torch.Event | None
    """The event after which the host has the results; None if there is nothing to wait for."""

    def copy_to_cpu(self, *, return_logprob: bool, return_hidden_states: bool) -> None:
        """Begin to copy the results that the host needs."""


class ForwardBatch(Protocol):
    """The input of one forward pass: B sequences, T tokens."""

    forward_mode: ForwardMode
    batch_size: int
    rids: list[str] | None
    input_ids: torch.Tensor
    """[T]."""

    positions: torch.Tensor
    """[T], int64."""

    out_cache_loc: torch.Tensor
    """KV indices [T], int64, to which KV is written."""

    req_pool_indices: torch.Tensor
    """Request slots [B], int64."""

    seq_lens: torch.Tensor
    """Tokens [B], int64, those of this pass included."""

    seq_lens_cpu: torch.Tensor | None
    """The same on the host; None in a batch over memory whose contents change from pass to pass."""

    seq_lens_sum: int | None
    orig_seq_lens: torch.Tensor
    """The same [B], int32."""

    num_token_non_padded: torch.Tensor | None
    return_logprob: bool
    sampling_info: SamplingInfo | None
    extend_prefix_lens_cpu: list[int] | None
    """[B] of an extend batch: tokens of each sequence before this pass."""

    extend_seq_lens_cpu: list[int] | None
    """[B] of an extend batch: tokens of each in this pass."""
