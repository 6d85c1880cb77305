"""What we use of SGLang's batches: the scheduler's, that of one forward pass, and a pass's results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from sgl_batch.sglang_adapter.types.requests import Request


class ForwardMode(Protocol):
    """What a batch is computed for."""

    def is_decode(self) -> bool:
        """One token of each sequence."""

    def is_extend(self) -> bool:
        """Prompts, or pieces of them."""

    def is_cuda_graph(self) -> bool:
        """What SGLang's graphs can be captured for."""


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
    """[B], int64; None where SGLang draws from a generator of its own."""

    penalizer_orchestrator: Penalties


class ScheduleBatch(Protocol):
    """A batch of the scheduler: that of a prefill group, or the decode batch. B is the number of its requests."""

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
    """[B] of a prefill: how many tokens of each request were computed before."""

    extend_lens: list[int]
    """[B] of a prefill: how many tokens of each it computes."""

    extend_num_tokens: int
    """Their sum."""

    req_pool_indices: torch.Tensor
    """Rows of the table of slots [B], int64."""

    req_pool_indices_cpu: torch.Tensor
    seq_lens: torch.Tensor
    """Tokens with KV [B], int64."""

    seq_lens_cpu: torch.Tensor
    orig_seq_lens: torch.Tensor
    """The same [B], int32."""

    def is_empty(self) -> bool:
        """Whether it has no requests."""

    def prepare_for_extend(self) -> None:
        """Give the tokens of a prefill their slots, and make its tensors."""

    def prepare_for_decode(self) -> None:
        """Give the next token of each sequence its slot, and make the step's tensors."""

    def filter_batch(self, *, keep_indices: list[int] | None = None) -> None:
        """Keep the requests at these places; without them, those that have not ended."""

    def merge_batch(self, other: ScheduleBatch) -> None:
        """Add the requests of another decode batch behind its own."""

    def copy(self) -> ScheduleBatch:
        """What the processing of results needs of it."""


class LogitsOutput(Protocol):
    """What the model's head makes of a pass (SGLang's LogitsProcessorOutput)."""

    next_token_logits: torch.Tensor | None
    """[B, vocabulary]."""


class BatchResult(Protocol):
    """The results of a pass (SGLang's GenerationBatchResult)."""

    logits_output: LogitsOutput
    copy_done: torch.Event | None
    """After it the host has what it wants of the results; None where there is nothing to wait for."""

    def copy_to_cpu(self, *, return_logprob: bool, return_hidden_states: bool) -> None:
        """Begin to copy what the host wants."""


class ForwardBatch(Protocol):
    """What one forward pass computes: B sequences, T tokens."""

    forward_mode: ForwardMode
    batch_size: int
    rids: list[str] | None
    input_ids: torch.Tensor
    """[T]."""

    positions: torch.Tensor
    """[T], int64."""

    out_cache_loc: torch.Tensor
    """Slots [T], int64, to which KV is written."""

    req_pool_indices: torch.Tensor
    """Rows of the table of slots [B], int64."""

    seq_lens: torch.Tensor
    """Tokens [B], int64, with those of this pass."""

    seq_lens_cpu: torch.Tensor | None
    """The same on the host; None of a batch over memory whose contents change from pass to pass."""

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
