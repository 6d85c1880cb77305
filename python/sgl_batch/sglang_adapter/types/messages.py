"""Owns the types of the messages that users send to SGLang's processes: requests, and controls of the whole engine."""

from __future__ import annotations

import asyncio
from dataclasses import Field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypedDict

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


class OpenAIRequest(Protocol):
    """A request of one of SGLang's OpenAI endpoints, a pydantic model."""

    model_fields: ClassVar[dict[str, FieldInfo]]
    seed: int | None


class GenerationRequest(Protocol):
    """A generation request as the tokenizer manager gets it, not checked yet (SGLang's GenerateReqInput)."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    text: object
    input_ids: object
    rid: object
    sampling_params: object
    """A mapping, or a list of one for each prompt."""

    top_logprobs_num: object
    logprob_start_len: object
    return_routed_experts: bool


class PromptsRequest(Protocol):
    """A normalised generation request of several prompts or choices (SGLang's GenerateReqInput)."""

    rid: list[str]
    batch_size: int
    """Prompts."""

    def __getitem__(self, i: int) -> ChoiceRequest:
        """Return the request of one prompt."""


class ChoiceRequest(Protocol):
    """The request of one choice of one prompt (SGLang's GenerateReqInput)."""

    rid: str
    return_prompt_token_ids: bool


class RequestState(Protocol):
    """The tokenizer manager's state of a request under way (SGLang's ReqState)."""

    obj: GenerationRequest
    output_ids: list[int]
    """The tokens of its answer so far."""
    out_list: list[Answer]
    """Parts of the answer that wait to be taken; `event` is set when there are any."""
    finished: bool
    event: asyncio.Event


class EndReason(TypedDict, total=False):
    """Why an answer has ended, as clients get it."""

    type: str
    message: str
    err_type: str
    status_code: int | None


class AnswerMeta(TypedDict, total=False):
    """Information about an answer."""

    id: str
    """The request's id."""

    finish_reason: EndReason


class Answer(TypedDict, total=False):
    """An answer of SGLang's engine, or a part of one."""

    text: str
    output_ids: list[int]
    index: int
    """The number of the choice, if there are several."""

    meta_info: AnswerMeta


class AbortRequest(Protocol):
    """Abort requests (SGLang's AbortReq)."""

    rid: str
    """A prefix of the ids of the requests to abort; "" if it is not given."""

    abort_all: bool


class PauseRequest(Protocol):
    """Start no further step (SGLang's PauseGenerationReqInput)."""

    mode: str
    """What happens to sequences: "abort", "retract" or "in_place"."""


class StateChange(Protocol):
    """Change numbers of a running engine (SGLang's SetInternalStateReq)."""

    server_args: dict[str, int | float]


class WeightsUpdate(Protocol):
    """New weights, from any source (SGLang's Update...ReqInput)."""

    flush_cache: bool
    """Whether all KV of the old weights is dropped."""


class UpdateGroupRequest(Protocol):
    """Join a group with a process that sends weights (SGLang's InitWeightsUpdateGroupReqInput)."""

    master_address: str
    master_port: int
    rank_offset: int
    """The rank in the group of SGLang's rank 0."""

    world_size: int
    group_name: str
    backend: str


class WeightRequest(Protocol):
    """Read a weight (SGLang's GetWeightsByNameReqInput)."""

    name: str


class TensorsUpdate(Protocol):
    """New weights in shared memory, or as a file (SGLang's UpdateWeightsFromTensorReqInput)."""

    serialized_named_tensors: list[bytes]
    """One for each rank, or one for all ranks."""

    load_format: str | None


class ProfileRequest(Protocol):
    """Start a profile (SGLang's ProfileReq)."""

    num_steps: int | None
    activities: list[str] | None
    output_dir: str | None


class LoggingRequest(Protocol):
    """Set what is logged and dumped of requests (SGLang's ConfigureLoggingReq)."""

    log_requests_level: int | None
    log_requests_format: str | None
    log_level: str | None
    dump_requests_folder: str | None
    dump_requests_threshold: int | None
    crash_dump_folder: str | None


class ServerArgs(Protocol):
    """SGLang's arguments, as far as our processes are started with them."""

    device: str
    host: str
    port: int
    model_path: str
    revision: str | None
    load_format: str
    dp_size: int
    attention_backend: str | None
    enable_deterministic_inference: bool
    api_key: str | None
    admin_api_key: str | None
    log_level_http: str | None
