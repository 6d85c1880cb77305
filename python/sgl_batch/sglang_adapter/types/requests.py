"""Owns the types of SGLang's requests: those in the scheduler, and those that the tokenizer manager sends to it."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class FinishReason(Protocol):
    """The reason why a request has ended, or will end."""

    def to_json(self) -> dict[str, object]:
        """Return it as clients get it; `type` is "stop", "length" or "abort"."""


class SamplingParams(Protocol):
    """A request's sampling parameters. In the scheduler they are checked and complete."""

    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    min_new_tokens: int
    max_new_tokens: int
    """SGLang has None if no limit is given, until the scheduler sets one."""

    n: int
    top_k: int
    top_p: float
    min_p: float
    sampling_seed: int | None
    logit_bias: dict[str, float] | None
    stop_token_ids: set[int] | None
    stop_regex_strs: str | list[str] | None
    stream_interval: int | None
    structural_tag: str | None
    custom_params: dict[str, object] | None


class RequestKV(Protocol):
    """A request's share of the KV pool."""

    kv_allocated_len: int
    """Tokens that have KV indices."""


class RequestLogprobs(Protocol):
    """Which log probabilities a request asks for."""

    top_logprobs_num: int
    token_ids_logprob: list[int] | None


class RequestTimes(Protocol):
    """The times of a request's events."""

    def set_completion_time(self) -> None:
        """Record that it has ended now."""

    def set_wait_queue_entry_time(self) -> None:
        """Record that it is queued now."""


class TokenRange(Protocol):
    """Tokens of a request, [start, end)."""

    start: int

    @property
    def length(self) -> int:
        """The number of tokens."""


class Request(Protocol):
    """A request in the scheduler (SGLang's Req)."""

    rid: str
    origin_input_ids: array[int]
    """The prompt's tokens."""

    output_ids: array[int]
    """The tokens generated so far. SGLang only appends to it; our code may replace the array."""

    sampling_params: SamplingParams
    eos_token_ids: set[int] | None
    tokenizer: object
    extra_key: str | None
    """Keeps prefixes apart in SGLang; ours carries tags (requests/prompt_groups, requests/partial_output_tag)."""

    kv_committed_len: int
    """Tokens whose KV is computed; while a step is under way, with the one that it computes."""

    kv: RequestKV | None
    req_pool_idx: int | None
    """Its request slot; None while it has none."""

    prefix_indices: torch.Tensor
    """KV indices [tokens], int64, of the tokens that were computed before its prefill."""

    extend_range: TokenRange
    """The tokens that the next prefill, or the last one, computes; SGLang has None before the first."""

    inflight_middle_chunks: int
    """Prefills under way after which its prompt is not completely computed."""

    cache_protected_len: int
    """How many of its first tokens have KV that it does not own."""

    is_retracted: bool
    to_finish: FinishReason | None
    """The reason with which it ends at its next step; `finished_reason` may not be set in between."""

    finished_reason: FinishReason | None
    time_stats: RequestTimes
    logprob: RequestLogprobs
    return_logprob: bool
    logprob_start_len: int
    """The first token of the prompt that needs log probabilities; -1 if none does."""

    return_routed_experts: bool
    routed_experts_start_len: int
    routed_experts: torch.Tensor | None

    @property
    def output_ids_through_stop(self) -> array[int]:
        """The generated tokens, up to the one that ended it."""

    def finished(self) -> bool:
        """Return whether it has ended."""

    def update_finish_state(self) -> None:
        """End it with `to_finish`, or if its last token ends it."""

    def set_finish_with_abort(self, error_msg: str) -> None:
        """Let it end at its next step, with this error; its prompt becomes one token."""

    def init_next_round_input(self, tree_cache: object) -> None:
        """Prepare it for a prefill, and look for its prefix in SGLang's cache."""

    def set_extend_range(self, start: int, end: int) -> None:
        """Set which of its tokens, [start, end), the next prefill computes."""

    def reset_for_retract(self) -> None:
        """Reset it to its state before its prefill, except for its output; it holds no KV and no request slot."""


class TokenizedRequest(Protocol):
    """A generation request on its way to the scheduler (SGLang's TokenizedGenerateReqInput)."""

    rid: str
    input_ids: array[int] | list[int]
    sampling_params: SamplingParams
    extra_key: str | None
    routed_dp_rank: int | None
    time_stats: object
