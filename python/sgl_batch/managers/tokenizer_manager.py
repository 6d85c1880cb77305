"""Owns our subclass of SGLang's tokenizer manager, through which every request goes to the schedulers.

It refuses requests that a scheduler cannot compute, gives every request a seed, and sends choices (n > 1) that share a
prompt.
"""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import uuid
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TypeAlias

from starlette.requests import Request

from sgl_batch.core.output_order import OutputOrder
from sgl_batch.errors import EngineError
from sgl_batch.managers.engine_death import SHUT_DOWN, EngineDeath
from sgl_batch.managers.failure_reporter import fault_text
from sgl_batch.requests.abort_causes import RequestedAborts
from sgl_batch.requests.field_checks import check_generation_fields, check_openai_fields
from sgl_batch.requests.grammar_check import CompileProcess, GrammarCheck, refuse_grammars
from sgl_batch.requests.partial_outputs import PartialOutputs
from sgl_batch.requests.profile_limits import check_activities, check_directory, steps_of
from sgl_batch.requests.prompt_groups import ChoiceTag
from sgl_batch.requests.request_checks import (
    check_log_probabilities,
    check_routed_experts,
    check_sampling,
    check_shape,
    check_tokens,
    refusal_of,
)
from sgl_batch.requests.request_logs import WaitingDumps, bound_targets, check_logging, remove_oldest_dumps
from sgl_batch.requests.seeds import choice_seed
from sgl_batch.sglang_adapter.grammars import compiles_with_xgrammar, tokenizer_info
from sgl_batch.sglang_adapter.names import SAFETENSORS
from sgl_batch.sglang_adapter.ordered_outputs import parts_of
from sgl_batch.sglang_adapter.processes import close_sockets, sockets_of
from sgl_batch.sglang_adapter.profiling import ProfileReq
from sgl_batch.sglang_adapter.refusals import json_of
from sgl_batch.sglang_adapter.tokenizing import (
    FlushCacheReqInput,
    ServerStatus,
    SignalHandler,
    TokenizerManager,
    as_attention_ranks,
    calls_to_schedulers,
    check_serializable,
    choice_of,
    name_choices,
    prepare_request,
)
from sgl_batch.sglang_adapter.types.messages import (
    Answer,
    GenerationRequest,
    LoggingRequest,
    OpenAIRequest,
    PauseRequest,
    ProfileRequest,
    PromptsRequest,
    RequestState,
    TensorsUpdate,
)
from sgl_batch.sglang_adapter.types.requests import TokenizedRequest

logger = logging.getLogger(__name__)


class BatchSignalHandler(SignalHandler):  # type: ignore[misc]
    """SGLang's signal handler, except that the program stays alive when a process of the engine asks for its end.

    It is made when the first request arrives, and takes the place of the earlier handler of SIGTERM.
    """

    def __init__(self, tokenizer_manager: BatchTokenizerManager) -> None:
        super().__init__(tokenizer_manager)
        self._before = signal.getsignal(signal.SIGTERM)

    def sigterm_handler(self, signum: int | None = None, frame: FrameType | None = None) -> None:
        """Leave SIGTERM to the HTTP server, which answers its requests and ends; except where the engine is unhealthy.

        SGLang's handler checks every five seconds whether all requests are answered, and then kills the process, when
        the last answers may not be sent yet.
        """
        manager = self.tokenizer_manager
        if manager.server_drains and callable(self._before) and manager.server_status is not ServerStatus.UnHealthy:
            self._before(signal.SIGTERM, None)
        else:
            super().sigterm_handler(signum, frame)

    def running_phase_sigquit_handler(self, signum: int | None = None, frame: FrameType | None = None) -> None:
        """Note the engine's death. SGLang's processes send SIGQUIT where they hang (--watchdog-timeout)."""
        self.tokenizer_manager.note_death(
            EngineError("a process of the engine has asked for its end (SIGQUIT); its own message stands above")
        )


@contextmanager
def _as_refusal() -> Iterator[None]:
    """Turn what SGLang raises for a user's request into RefusalError, with the field at fault where it is known."""
    try:
        yield
    except (ValueError, TypeError, OverflowError, re.error) as error:
        raise refusal_of(error) from error


# A choice's request id, and the parts of its answer as they come.
Waiter: TypeAlias = tuple[str, AsyncIterator[Answer]]
# How often the schedulers are asked whether they have paused; they answer between two steps.
_LOOK_EVERY_S = 0.01


def _generates(request: object) -> bool:
    """Return whether a request, tokenized or not, generates. SGLang's other requests (embeddings) lack this field."""
    return hasattr(request, "top_logprobs_num")


class BatchTokenizerManager(TokenizerManager):  # type: ignore[misc]
    """SGLang's tokenizer manager, which checks requests and gives each a seed.

    `death`: whether the engine still answers.
    `server_drains`: the HTTP server of this process ends it in order when asked to.
    `partial_outputs`: the tokens known of unfinished answers to request lines.
    `grammar_process`: checks grammars; to be closed with the engine.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.signal_handler_class = BatchSignalHandler
        self.server_drains = False
        self.death = EngineDeath()
        for name, call in calls_to_schedulers(self).items():
            setattr(self, name, partial(self.death.unless_dead, call))
        self.partial_outputs = PartialOutputs()
        self._aborts = RequestedAborts()
        self._output_order: OutputOrder[object] = OutputOrder()
        self.grammar_process = CompileProcess(self._tokenizer_info)
        whitespace = not self.server_args.constrained_json_disable_any_whitespace
        self._grammars = GrammarCheck(self.grammar_process.fault, any_whitespace=whitespace)
        self._next_target = 0
        self._waiting_dumps, self._kept_for_crash = WaitingDumps(), WaitingDumps()
        bound_targets(self.request_logger.targets)
        if self.crash_dump_folder:
            remove_oldest_dumps(Path(self.crash_dump_folder))
        # An engine that does not start is not shut down, and its manager is collected as garbage.
        weakref.finalize(self, close_sockets, sockets_of(self)).atexit = False

    async def generate_request(self, obj: GenerationRequest, request: Request | None = None) -> AsyncIterator[object]:
        """Yield SGLang's answers. Raises ValueError for one that cannot be computed, EngineError of a dead engine."""
        if _generates(obj):
            check_shape(obj)
            given = await json_of(request) if request is not None and request.url.path == "/generate" else {}
            check_generation_fields(obj, given, reads_media=self.mm_processor is not None)
            if self.server_args.grammar_backend == "none":
                refuse_grammars(obj.sampling_params)
            if self.tokenizer is not None and compiles_with_xgrammar(self.server_args):
                await self._grammars.check(obj.sampling_params)
        async for out in super().generate_request(obj, request):
            yield out

    def check_openai(self, request: OpenAIRequest, given: Mapping[str, object]) -> None:
        """Raise RefusalError for a request of an OpenAI endpoint, read from `given`, that is not computed."""
        check_openai_fields(request, given, reads_media=self.mm_processor is not None)

    def _tokenizer_info(self) -> str:
        return tokenizer_info(self.tokenizer, self.model_config.vocab_size, self.model_config.hf_eos_token_id)

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Abort requests as SGLang does, and note that their abort was requested."""
        self._aborts.note(rid, self.rid_to_state.keys(), abort_all=abort_all)
        super().abort_request(rid, abort_all)

    # The engine's death.

    def note_death(self, error: EngineError) -> None:
        """Note that the engine answers nothing any more. Any thread may call this."""
        self.death.note(error, self.rid_to_state, self.event_loop)

    def note_end(self) -> None:
        """Note that the engine is shut down, unless its death is noted already. Later calls raise EngineError."""
        if self.death.is_raised:
            self.note_death(EngineError(SHUT_DOWN))

    def _dispatch_to_scheduler(self, obj: object) -> None:
        self.death.raise_if_dead()
        super()._dispatch_to_scheduler(obj)

    async def handle_loop(self) -> None:
        """Read answers as SGLang does. A fault in it is the engine's death; SGLang would end the program."""
        try:
            await super().handle_loop()
        except Exception as error:
            logger.exception("the tokenizer manager fails")
            self.note_death(EngineError(f"the tokenizer manager failed: {fault_text(error)}"))

    async def _handle_batch_output(self, recv_obj: object) -> None:
        """Read the parts of each answer in order. Schedulers send them here where no process detokenizes between."""
        for message in self._output_order.take(recv_obj, parts_of(recv_obj)):
            await super()._handle_batch_output(message)

    async def _handle_abort_finish_reason(self, out: Answer, state: RequestState, is_stream: bool) -> object:
        self.death.raise_if_dead()
        self._aborts.judge(out, state.obj.sampling_params, is_stream=is_stream)
        return await super()._handle_abort_finish_reason(out, state, is_stream)

    def _validate_one_request(self, obj: GenerationRequest, input_ids: object) -> None:
        """Make SGLang's checks, and ours, without which a scheduler could crash. Raises ValueError."""
        if _generates(obj):
            if obj.input_ids is not None:
                check_tokens(input_ids, self.model_config.vocab_size)
            check_log_probabilities(obj, self.model_config.vocab_size, self.context_len)
            check_routed_experts(obj, is_enabled=self.server_args.enable_return_routed_experts)
        with _as_refusal():
            super()._validate_one_request(obj, input_ids)

    def _create_tokenized_object(self, obj: object, *args: object, **kwargs: object) -> object:
        """Return the request as its scheduler gets it. Raises ValueError."""
        with _as_refusal():
            tokenized = super()._create_tokenized_object(obj, *args, **kwargs)
        if _generates(tokenized):
            check_sampling(tokenized.sampling_params, self.model_config.vocab_size)
            check_serializable(tokenized)
        return tokenized

    def _send_one_request(self, tokenized_obj: TokenizedRequest) -> None:
        self._prepare(tokenized_obj)
        super()._send_one_request(tokenized_obj)

    def _send_batch_request(self, tokenized_objs: list[TokenizedRequest]) -> None:
        for tokenized in tokenized_objs:
            self._prepare(tokenized)
        super()._send_batch_request(tokenized_objs)

    def _prepare(self, tokenized: TokenizedRequest) -> None:
        """Give a generation request its seed, and replace its prefix-cache key by our tag, or None."""
        parameters = getattr(tokenized, "sampling_params", None)
        if parameters is not None and hasattr(parameters, "sampling_seed"):
            key = self.partial_outputs.key_for(tokenized)
            prepare_request(tokenized, extra_key=key, seed=choice_seed(parameters.sampling_seed, 0))

    # Profiles, which end by themselves; logs and dumps of requests, which are bounded.

    async def start_profile(self, req: ProfileRequest | None = None) -> object:
        """Start a profile that ends by itself. Raises RequestError for one that is too long or cannot be made."""
        req = req or ProfileReq()
        req.num_steps = steps_of(req.num_steps)
        check_activities(req.activities, on_cpu=self.server_args.device == "cpu")
        check_directory(req.output_dir)
        return await super().start_profile(req)

    @property
    def request_log_paths(self) -> list[str]:
        """The files to which requests are logged: a few, of bounded size."""
        return bound_targets(self.request_logger.targets)

    def configure_logging(self, obj: LoggingRequest) -> None:
        """Change the logging of requests. Raises RequestError for settings that cannot be carried out."""
        check_logging(obj)
        super().configure_logging(obj)
        bound_targets(self.request_logger.targets)

    def dump_requests(self, state: RequestState, out_dict: Answer) -> None:
        self._waiting_dumps.add(state.obj, out_dict)
        threshold: int = self.dump_requests_threshold
        self.dump_requests_threshold: int = 1 if self._waiting_dumps.are_too_large else threshold
        super().dump_requests(state, out_dict)
        self.dump_requests_threshold = threshold
        self._waiting_dumps.keep(len(self.dump_request_list))

    def _dump_data_to_file(self, data_list: object, filename: str, log_message: str) -> None:
        remove_oldest_dumps(Path(filename).parent)
        super()._dump_data_to_file(data_list, filename, log_message)

    def record_request_for_crash_dump(self, state: RequestState, out_dict: Answer) -> None:
        kept = self.crash_dump_request_list
        super().record_request_for_crash_dump(state, out_dict)
        self._kept_for_crash.add(state.obj, out_dict)
        self._kept_for_crash.keep(len(kept))
        while self._kept_for_crash.are_too_large:
            kept.popleft()
            self._kept_for_crash.keep(len(kept))

    # Controls of the whole engine.

    async def pause_generation(self, obj: PauseRequest) -> None:
        """Pause. When this returns no forward pass is under way, and none begins before `continue_generation`."""
        await super().pause_generation(obj)
        while obj.mode != "abort" and self.is_pause:
            states = await self.get_internal_state()
            if all(state["sgl_batch"]["paused"] for state in states):
                return
            await asyncio.sleep(_LOOK_EVERY_S)

    async def flush_cache(self, timeout_s: float | None = None) -> object:
        """Return SGLang's answer of the first rank that could not flush, or of any rank where all could."""
        self.auto_create_handle_loop()
        answers = await self.flush_cache_communicator(FlushCacheReqInput(timeout_s=timeout_s))
        return next((answer for answer in answers if not answer.success), answers[0])

    async def release_memory_occupation(self, obj: object, request: Request | None = None) -> None:
        """Release memory. Raises ValueError where SGLang would ignore this, or it would crash the scheduler."""
        self._check_memory_saver("release")
        if self.rid_to_state:
            raise ValueError(f"{len(self.rid_to_state)} requests are under way: memory is released when there are none")
        await super().release_memory_occupation(obj, request)

    async def resume_memory_occupation(self, obj: object, request: Request | None = None) -> None:
        """Resume memory. Raises ValueError as release_memory_occupation does."""
        self._check_memory_saver("resume")
        await super().resume_memory_occupation(obj, request)

    def _check_memory_saver(self, what: str) -> None:
        if self.server_args.device == "cpu":
            raise ValueError(f"cannot {what} memory occupation: SGLang's memory saver is for GPUs, and this is a CPU")
        if not self.server_args.enable_memory_saver:
            raise ValueError(f"cannot {what} memory occupation: start the engine with --enable-memory-saver")

    async def init_weights_update_group(self, obj: object, request: Request | None = None) -> object:
        with as_attention_ranks(self.server_args):
            return await super().init_weights_update_group(obj, request)

    async def destroy_weights_update_group(self, obj: object, request: Request | None = None) -> object:
        with as_attention_ranks(self.server_args):
            return await super().destroy_weights_update_group(obj, request)

    async def update_weights_from_disk(self, obj: object, request: Request | None = None) -> object:
        self.partial_outputs.stop()
        return await super().update_weights_from_disk(obj, request)

    async def update_weights_from_ipc(self, obj: object, request: Request | None = None) -> object:
        """Refuse: checkpoint-engine reads pickles from a socket that the request names, and calls their contents."""
        return False, (
            "weights are not taken from a checkpoint-engine, which sends programs with them: send tensors or "
            "safetensors (/update_weights_from_tensor), or broadcast them (/update_weights_from_distributed)"
        )

    async def update_weights_from_distributed(self, obj: object, request: Request | None = None) -> object:
        self.partial_outputs.stop()
        with as_attention_ranks(self.server_args):
            return await super().update_weights_from_distributed(obj, request)

    async def update_weights_from_tensor(self, obj: TensorsUpdate, request: Request | None = None) -> object:
        """Update weights. Every rank needs tensors of its own, because only one process can open a tensor's handle.

        The bytes of a safetensors file may be the same for all ranks.
        """
        given, ranks = len(obj.serialized_named_tensors), self.server_args.dp_size
        if given != ranks and not (given == 1 and obj.load_format == SAFETENSORS):
            return False, f"serialized_named_tensors has {given} items; give one for each of {ranks} ranks"
        self.partial_outputs.stop()
        with as_attention_ranks(self.server_args):
            return await super().update_weights_from_tensor(obj, request)

    async def _handle_batch_request(self, obj: PromptsRequest, request: Request | None = None) -> AsyncIterator[object]:
        count = getattr(obj, "parallel_sample_num", 1)
        if count == 1:
            async for out in super()._handle_batch_request(obj, request):
                yield out
            return
        waiters = await self._send_choices(obj, request, count)
        if not getattr(obj, "stream", False):
            yield await asyncio.gather(*(anext_of(waiter) for _, waiter in waiters))
            return
        async for out in _interleave(waiters):
            yield out

    async def _send_choices(self, obj: PromptsRequest, request: Request | None, count: int) -> list[Waiter]:
        """Send `count` choices of each prompt of `obj`, all choices of a prompt in one message, so that they share it.

        One of several ranks computes all choices of a prompt. Each choice has an id of `obj`, so that a client that
        aborts `obj` aborts its choices.
        """
        prompts = [obj[i] for i in range(obj.batch_size)]
        tokenized_prompts = await asyncio.gather(*(self._tokenize_one_request(prompt) for prompt in prompts))
        for rid in obj.rid:  # SGLang awaits an answer to each state, also when it shuts down
            self.rid_to_state.pop(rid).time_stats.set_finished_time()
        rids = iter(name_choices(obj, count))
        waiters: list[Waiter] = []
        for prompt, tokenized in zip(prompts, tokenized_prompts, strict=True):
            group, choices = uuid.uuid4().hex, []
            target, self._next_target = self._next_target, (self._next_target + 1) % self.server_args.dp_size
            for index in range(count):
                tag = ChoiceTag(group=group, index=index, count=count)
                seed = choice_seed(tokenized.sampling_params.sampling_seed, index)
                choice, choice_tokenized = choice_of(
                    prompt, tokenized, rid=next(rids), extra_key=tag.encode(), seed=seed, attention_rank=target
                )
                self._init_req_state(choice)
                state = self.rid_to_state[choice.rid]
                choice_tokenized.time_stats = state.time_stats
                if choice.return_prompt_token_ids:
                    state.prompt_token_ids = list(tokenized.input_ids)
                choices.append(choice_tokenized)
                waiters.append((choice.rid, self._wait_one_response(choice, request)))
            super()._send_batch_request(choices)
        return waiters


async def anext_of(waiter: AsyncIterator[Answer]) -> Answer:
    """Return the next response of one request, as a coroutine that can be gathered."""
    return await waiter.__anext__()


async def _interleave(waiters: list[Waiter]) -> AsyncIterator[Answer]:
    """Yield responses of several streams as they arrive, each with the index of its stream."""
    index_of = {rid: index for index, (rid, _) in enumerate(waiters)}
    pending = {asyncio.ensure_future(anext_of(waiter)): waiter for _, waiter in waiters}
    while pending:
        done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            waiter = pending.pop(task)
            try:
                out = task.result()
            except StopAsyncIteration:
                continue
            out["index"] = index_of[out["meta_info"]["id"]]
            yield out
            pending[asyncio.ensure_future(anext_of(waiter))] = waiter
