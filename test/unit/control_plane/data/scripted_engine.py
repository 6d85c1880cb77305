"""An engine that answers as its prompts say, and makes no processes."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.exceptions import HTTPException

from sgl_batch.errors import EngineError
from sgl_batch.sglang_adapter.names import ENGINE_ABORT


class EndedError(HTTPException):
    """As EngineAbortError in sglang_adapter/refusals.py, which imports SGLang."""

    code = ENGINE_ABORT


class ScriptedManager:
    """A model without a tokenizer, whose scheduler has decoded three rows at a time."""

    tokenizer: Any = None

    async def get_internal_state(self) -> list[dict[str, Any]]:
        counters = {"decode_rows": 12, "decode_groups": 4}
        return [{"sgl_batch": {"counters": counters, "cpu": {"cpus": 1, "threads": 2}}}]


class ScriptedEngine:
    """Answers a prompt with its words; "refuse", "busy", "odd", "ended" and "abort" fail, "kill" is its death."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager: Any = ScriptedManager()
        self.asked: list[dict[str, Any]] = []
        self.is_dead = False
        self.is_shut_down = False

    async def async_generate(self, **request: Any) -> dict[str, Any]:
        self.asked.append(request)
        prompt = request["prompt"]
        await asyncio.sleep(0)
        if prompt == "kill":
            self.is_dead = True
        for _ in range(3):
            await asyncio.sleep(0)
            if self.is_dead:
                raise EngineError("a process has ended")
        if prompt == "refuse":
            raise ValueError("the prompt is\n too long")
        if prompt == "busy":
            raise HTTPException(503, "no room")
        if prompt == "ended" or (prompt == "ended once" and self.asked.count(request) == 1):
            raise EndedError(500, "the engine ended the request")
        if prompt == "odd":
            raise ZeroDivisionError
        if prompt == "abort":
            return {"meta_info": {"finish_reason": {"type": "abort", "message": "by hand"}}}
        ids = list(range(len((prompt or "").split())))
        return {"text": prompt, "output_ids": ids, "meta_info": {"prompt_tokens": 7, "finish_reason": {"type": "stop"}}}

    def shutdown(self) -> None:
        self.is_shut_down = True
        self.loop.close()
