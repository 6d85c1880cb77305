"""What we use of SGLang's requests: those of its scheduler, and what the tokenizer manager sends to it."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class FinishReason(Protocol):
    """Why a request has ended, or is to end."""

    def to_json(self) -> dict[str, object]:
        """As clients get it; `type` is "stop", "length" or "abort"."""


class SamplingParams(Protocol):
    """How a request is sampled. The scheduler's have been checked, and filled in."""

    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    min_new_tokens: int
    max_new_tokens: int
    """SGLang has None for a limit that is not given, until the scheduler sets one."""

    n: int
    top_k: int
    top_p: float
    min_p: float
    sampling_seed: int | None
    logit_bias: dict[str, float] | None
    stop_token_ids: set[int] | None
    stream_interval: int | None
    structural_tag: str | None
    custom_params: dict[str, object] | None


class RequestKV(Protocol):
    """What a request holds of the KV pool."""

    kv_allocated_len: int
    """Tokens that have slots."""


class RequestLogprobs(Protocol):
    """Which log probabilities a request asks for."""

    top_logprobs_num: int
    token_ids_logprob: list[int] | None


class RequestTimes(Protocol):
    """When what happened to a request."""

    def set_completion_time(self) -> None:
        """It has ended now."""


class TokenRange(Protocol):
    """Tokens of a request, [start, end)."""

    start: int

    @property
    def length(self) -> int:
        """How many."""


class Request(Protocol):
    """A request in the scheduler (SGLang's Req)."""

    rid: str
    origin_input_ids: array[int]
    """The prompt's tokens."""

    output_ids: array[int]
    """The tokens generated so far. SGLang only ever appends to it; a whole other array may take its place."""

    sampling_params: SamplingParams
    eos_token_ids: set[int] | None
    tokenizer: object
    extra_key: str | None
    """Keeps prefixes apart in SGLang; ours carries tags (requests/prompt_groups, requests/partial_output_tag)."""

    kv_committed_len: int
    """Tokens whose KV is computed; while a step is under way, with the one that it computes."""

    kv: RequestKV | None
    req_pool_idx: int | None
    """Its row in the table of slots; None while it has none."""

    prefix_indices: torch.Tensor
    """Slots [tokens], int64, of what was computed before its prefill."""

    extend_range: TokenRange
    """What the coming prefill, or the last one, computes; SGLang has None before the first."""

    inflight_middle_chunks: int
    """Prefills under way after which its prompt is not computed whole."""

    cache_protected_len: int
    """How many of its first slots are not its to free."""

    is_retracted: bool
    to_finish: FinishReason | None
    """With what it is to end at its next step; `finished_reason` may not be set in between."""

    finished_reason: FinishReason | None
    time_stats: RequestTimes
    logprob: RequestLogprobs
    return_logprob: bool
    logprob_start_len: int
    """From which token of the prompt on log probabilities are asked for; -1: for none of them."""

    return_routed_experts: bool
    routed_experts_start_len: int
    routed_experts: torch.Tensor | None

    @property
    def output_ids_through_stop(self) -> array[int]:
        """The tokens generated, up to the one that ended it."""

    def finished(self) -> bool:
        """Whether it has ended."""

    def update_finish_state(self) -> None:
        """Have it end with `to_finish`, or where its last token says so."""

    def set_finish_with_abort(self, error_msg: str) -> None:
        """Have it end at its next step, with this error; its prompt becomes one token."""

    def init_next_round_input(self, tree_cache: object) -> None:
        """Make it ready for a prefill, and look for its prefix in SGLang's cache."""

    def set_extend_range(self, start: int, end: int) -> None:
        """Say which of its tokens, [start, end), the coming prefill computes."""

    def reset_for_retract(self) -> None:
        """Have it as it was before its prefill, but for its output; it holds nothing any more."""


class TokenizedRequest(Protocol):
    """A generation request on its way to the scheduler (SGLang's TokenizedGenerateReqInput)."""

    rid: str
    input_ids: array[int] | list[int]
    sampling_params: SamplingParams
    extra_key: str | None
    routed_dp_rank: int | None
    time_stats: object
