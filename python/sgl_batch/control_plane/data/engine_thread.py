"""Runs one engine in a thread of its own, with the engine's event loop, and answers requests from other threads.

SGLang's engine belongs to one event loop. Ray Data calls a stage from several threads, and ends it from another one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.exceptions import HTTPException

from sgl_batch.control_plane.data.row_requests import RowAnswer, RowRequest
from sgl_batch.engine.rank_stats import merged_stats
from sgl_batch.errors import EngineError, RequestError
from sgl_batch.sglang_adapter.names import ENGINE_ABORT

logger = logging.getLogger(__name__)

_END_S = 60.0


class RunningEngine(Protocol):
    """What is used of `sgl_batch.Engine`."""

    loop: asyncio.AbstractEventLoop
    tokenizer_manager: Any

    async def async_generate(self, **request: Any) -> Any: ...

    def shutdown(self) -> None: ...


@dataclass(slots=True)
class Occupancy:
    """How many rows an engine has: now, and at most.

    `answered`: how many it has answered, in `busy_s` seconds in which it had rows. `reported`: how many were answered
    at the last report.
    """

    now: int = 0
    most: int = 0
    answered: int = 0
    busy_s: float = 0.0
    reported: int = 0
    _busy_since: float = 0.0

    def add(self, rows: int) -> None:
        """Count rows that begin."""
        if self.now == 0:
            self._busy_since = time.monotonic()
        self.now += rows
        self.most = max(self.most, self.now)

    def end_one(self) -> None:
        """Count a row that ends."""
        self.now -= 1
        self.answered += 1
        if self.now == 0:
            self.busy_s += time.monotonic() - self._busy_since


class EngineThread:
    """One engine from its start to its end. `start` begins the start; `answers` may be awaited on any event loop.

    `occupancy`: the rows in the engine, written by its thread.
    """

    def __init__(self, make: Callable[[], RunningEngine], chat_template: Mapping[str, Any] | None = None) -> None:
        self._make, self._chat_template = make, dict(chat_template or {})
        self._started: Future[RunningEngine] = Future()
        # Set, on its own loop, for each call of `answers` that waits when the engine's loop ends.
        self._waiting: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}
        self._lock, self._has_ended = threading.Lock(), False
        self._under_way: set[asyncio.Task[Any]] = set()  # the work of these calls, on the engine's loop
        self._thread = threading.Thread(target=self._run, name="sgl_batch engine", daemon=True)
        self.occupancy = Occupancy()
        self.death: EngineError | None = None
        """Why the engine answers no more."""

    def start(self) -> None:
        """Start the engine; `ready` waits for it."""
        self._thread.start()

    async def ready(self) -> None:
        """Wait until the engine has started. Raises what its start raises: ConfigError, EngineError."""
        await asyncio.wrap_future(self._started)

    async def answers(self, requests: Sequence[RowRequest]) -> list[RowAnswer | None]:
        """Return the answer to each request, in order; None for a request that the engine's death has left open.

        The engine has started. A request that is refused is answered, with its error. Raises EngineError where `close`
        has ended an engine that was not dead.
        """
        engine, own_loop = self._started.result(), asyncio.get_running_loop()
        # The engine's loop may end before it has run this, or while it does.
        ended: asyncio.Future[None] = own_loop.create_future()
        with self._lock:
            if not self._has_ended:
                self._waiting[ended] = own_loop
                work = asyncio.run_coroutine_threadsafe(self._answer_all(engine, requests), engine.loop)
        if ended in self._waiting:
            answers = asyncio.wrap_future(work)
            either: set[asyncio.Future[Any]] = {answers, ended}
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            finally:
                with self._lock:
                    self._waiting.pop(ended, None)
                if not answers.done() and not ended.done():
                    answers.cancel()
            if answers.done() and not answers.cancelled():
                return answers.result()
        if self.death is None:
            raise EngineError("the engine was closed while rows waited for their answers")
        return [None] * len(requests)

    def close(self) -> None:
        """End the engine and its processes, and wait for their end. Idempotent."""
        if not self._thread.ident or threading.current_thread() is self._thread:
            return
        self._thread_loop_stop()
        self._thread.join(timeout=_END_S)

    def _thread_loop_stop(self) -> None:
        if self._started.exception() is None:  # waits for a start that is under way
            loop = self._started.result().loop
            if not loop.is_closed():
                loop.call_soon_threadsafe(loop.stop)

    def _run(self) -> None:
        try:
            engine = self._make()
        except BaseException as error:  # noqa: BLE001 - it is raised where `ready` is awaited
            self._started.set_exception(error)
            return
        try:
            self._started.set_result(engine)
            engine.loop.run_forever()
        finally:
            self._end_waits()
            engine.loop.run_until_complete(self._give_up())
            engine.shutdown()

    async def _give_up(self) -> None:
        """End what was sent to the engine's loop before its end."""
        for _ in range(2):  # it becomes tasks, and these begin
            await asyncio.sleep(0)
        left = list(self._under_way)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _end_waits(self) -> None:
        with self._lock:
            self._has_ended = True
            for ended, loop in self._waiting.items():
                loop.call_soon_threadsafe(ended.set_result, None)

    async def _answer_all(self, engine: RunningEngine, requests: Sequence[RowRequest]) -> list[RowAnswer | None]:
        task = asyncio.current_task()
        assert task is not None, "it was sent to the loop as a task"
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        rows = self.occupancy
        rows.add(len(requests))
        answers = await asyncio.gather(*(self._answer(engine, request) for request in requests))
        if rows.now == 0 and rows.answered >= 2 * rows.reported and self.death is None:
            rows.reported = rows.answered
            with suppress(EngineError):  # it has died since, and the next rows find that
                await self._report(engine)
        return answers

    async def _report(self, engine: RunningEngine) -> None:
        """Log how full the engine was, and on what. It has no row now: between two runs of rows, or at their end."""
        states = await engine.tokenizer_manager.get_internal_state()
        stats = merged_stats([state["sgl_batch"] for state in states])
        counters, cpu = stats["counters"], stats["cpu"]
        decoded_rows = counters.get("decode_rows", 0) - counters.get("drafts", 0)
        decoded = decoded_rows / max(counters.get("decode_groups", 0), 1)
        rows = self.occupancy
        logger.setLevel(logging.INFO)
        logger.info(
            "rows: %d answered in %.1f s, at most %d in the engine at once; %.1f decoded together on average%s",
            rows.answered,
            rows.busy_s,
            rows.most,
            decoded,
            f"; threads: {cpu['threads']}, on CPUs: {cpu['cpus']}" if cpu else "",
        )

    async def _answer(self, engine: RunningEngine, request: RowRequest) -> RowAnswer | None:
        try:
            return _as_answer(await self._generate(engine, request))
        except EngineError as error:
            self.death = self.death or error
            return None
        except (ValueError, RequestError, HTTPException) as error:
            return RowAnswer(error=_text_of(error))
        except Exception as error:
            logger.exception("a row fails")
            return RowAnswer(error=_text_of(error))
        finally:
            self.occupancy.end_one()

    async def _generate(self, engine: RunningEngine, request: RowRequest) -> Any:
        """Return SGLang's answer. A request that the engine ends by itself is tried once more."""
        input_ids = request.input_ids
        if request.messages is not None:
            input_ids = self._templated(engine, request.messages)
        for is_last in (False, True):
            try:
                return await engine.async_generate(
                    prompt=request.prompt, input_ids=input_ids, sampling_params=dict(request.sampling_params)
                )
            except HTTPException as error:
                if is_last or getattr(error, "code", None) != ENGINE_ABORT:
                    raise
        raise AssertionError("the last try returns or raises")

    def _templated(self, engine: RunningEngine, messages: list[dict[str, Any]]) -> list[int]:
        """Return the tokens of a conversation, by the model's chat template. Raises RequestError."""
        tokenizer = engine.tokenizer_manager.tokenizer
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            raise RequestError(
                code="no_chat_template",
                message="the model has no chat template: give the row a prompt instead of messages",
                param="messages",
            )
        options = {"add_generation_prompt": True, **self._chat_template}
        return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options))


def _as_answer(output: Any) -> RowAnswer:
    meta = output["meta_info"]
    reason = meta.get("finish_reason") or {}
    if reason.get("type") == "abort":
        return RowAnswer(error=f"the request was aborted: {reason.get('message') or 'on demand'}")
    return RowAnswer(
        text=output.get("text") or "",
        tokens=list(output.get("output_ids") or ()),
        num_input_tokens=meta["prompt_tokens"],
    )


def _text_of(error: Exception) -> str:
    """Return an error as one line, which is not empty."""
    text = str(getattr(error, "detail", None) or error)
    return " ".join(text.split()) or type(error).__name__
