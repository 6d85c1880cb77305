"""What we use of what users ask SGLang's processes for: requests as they come, and controls of the whole engine."""

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
    """A generation request as the tokenizer manager gets it (SGLang's GenerateReqInput), not checked yet."""

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
    """A generation request of several prompts or choices (SGLang's GenerateReqInput), made uniform."""

    rid: list[str]
    batch_size: int
    """Prompts."""

    def __getitem__(self, i: int) -> ChoiceRequest:
        """The request of one prompt."""


class ChoiceRequest(Protocol):
    """The request of one choice of one prompt (SGLang's GenerateReqInput)."""

    rid: str
    return_prompt_token_ids: bool


class RequestState(Protocol):
    """What the tokenizer manager knows of a request under way (SGLang's ReqState)."""

    obj: GenerationRequest
    output_ids: list[int]
    """The tokens that have come of its answer."""
    out_list: list[Answer]
    """Parts of the answer that wait to be taken, which `event` says."""
    finished: bool
    event: asyncio.Event


class EndReason(TypedDict, total=False):
    """Why an answer has ended, as clients get it."""

    type: str
    message: str
    err_type: str
    status_code: int | None


class AnswerMeta(TypedDict, total=False):
    """What an answer says of itself."""

    id: str
    """The request's."""

    finish_reason: EndReason


class Answer(TypedDict, total=False):
    """An answer of SGLang's engine, or a part of one."""

    text: str
    output_ids: list[int]
    index: int
    """Of several choices, which."""

    meta_info: AnswerMeta


class AbortRequest(Protocol):
    """Abort requests (SGLang's AbortReq)."""

    rid: str
    """With what the ids of those that are meant begin; "" where it is not given."""

    abort_all: bool


class PauseRequest(Protocol):
    """Begin no step (SGLang's PauseGenerationReqInput)."""

    mode: str
    """What becomes of sequences: "abort", "retract" or "in_place"."""


class StateChange(Protocol):
    """Change numbers of a running engine (SGLang's SetInternalStateReq)."""

    server_args: dict[str, int | float]


class WeightsUpdate(Protocol):
    """New weights, from wherever they come (SGLang's Update...ReqInput)."""

    flush_cache: bool
    """Whether all KV of the old weights goes."""


class UpdateGroupRequest(Protocol):
    """Meet a process that is to send weights (SGLang's InitWeightsUpdateGroupReqInput)."""

    master_address: str
    master_port: int
    rank_offset: int
    """The place in the group of SGLang's rank 0."""

    world_size: int
    group_name: str
    backend: str


class WeightRequest(Protocol):
    """Read a weight (SGLang's GetWeightsByNameReqInput)."""

    name: str


class TensorsUpdate(Protocol):
    """New weights in shared memory, or as a file (SGLang's UpdateWeightsFromTensorReqInput)."""

    serialized_named_tensors: list[bytes]
    """One for each rank, or one for all."""

    load_format: str | None


class ProfileRequest(Protocol):
    """Begin a profile (SGLang's ProfileReq)."""

    num_steps: int | None
    activities: list[str] | None
    output_dir: str | None


class LoggingRequest(Protocol):
    """What to log and dump of requests (SGLang's ConfigureLoggingReq)."""

    log_requests_level: int | None
    log_requests_format: str | None
    log_level: str | None
    dump_requests_folder: str | None
    dump_requests_threshold: int | None
    crash_dump_folder: str | None


class ServerArgs(Protocol):
    """SGLang's arguments, as far as processes of ours are started by them."""

    device: str
    host: str
    port: int
    model_path: str
    attention_backend: str | None
    enable_deterministic_inference: bool
    api_key: str | None
    admin_api_key: str | None
    log_level_http: str | None
