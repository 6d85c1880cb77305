"""Adapts SGLang's OpenAI endpoints for calls in this process: a request body in, a status and a response body out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.body_faults import first_fault
from sgl_batch.sglang_adapter.refusals import Check, RefusalError, fault_of, with_check, wrong_value

with bootstrap.importing():
    from pydantic import ValidationError
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
    from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion


class OpenAIEndpoints:
    """The handlers of /v1/chat/completions and /v1/completions over a tokenizer manager of this process.

    `check` raises RefusalError for a request that is refused.
    """

    def __init__(self, tokenizer_manager: Any, template_manager: Any, check: Check) -> None:
        self._tokenizer_manager, self._check = tokenizer_manager, check
        self._routes: dict[str, tuple[Any, Any]] = {
            "/v1/chat/completions": (
                ChatCompletionRequest,
                with_check(OpenAIServingChat(tokenizer_manager, template_manager), check),
            ),
            "/v1/completions": (
                CompletionRequest,
                with_check(OpenAIServingCompletion(tokenizer_manager, template_manager), check),
            ),
        }

    async def post(self, url: str, body: Mapping[str, object], rid: str) -> tuple[int, dict[str, Any]]:
        """Return the status and body of the online endpoint; errors are {"error": {message, type, param, code}}.

        `rid`: the request id if the body has none.

        Cancelling the call aborts the request; SGLang itself would continue it.
        """
        request_class, handler = self._routes[url]
        try:
            request = request_class.model_validate(dict(body))
            self._check(request, body)
        except ValidationError as error:
            return 400, {"error": wrong_value(*first_fault(error.errors(), body))}
        except RefusalError as error:
            return 400, {"error": fault_of(error)}
        except (AttributeError, TypeError) as error:  # of its validators, on values of types that they do not expect
            return 400, {"error": wrong_value(f"a field has a value of a wrong type: {error}", None)}
        if request.rid is None:
            request.rid = rid
        try:
            response = await handler.handle_request(request, None)
        except asyncio.CancelledError:
            for rid in _ids_of(request):
                self._tokenizer_manager.abort_request(rid)
            raise
        if hasattr(response, "status_code"):
            content = json.loads(response.body)
            fault = {name: content.get(name) for name in ("message", "type", "param", "code")}
            return response.status_code, {"error": fault}
        return 200, json.loads(response.model_dump_json())


def _ids_of(request: Any) -> list[str]:
    """Return every id that the engine may use for a request: its own, or those of its prompts' choices."""
    given = [request.rid] if isinstance(request.rid, str) else list(request.rid)
    prompts = getattr(request, "prompt", None)
    num_prompts = len(prompts) if isinstance(prompts, list) else 1
    return given + [f"{rid}_{index}" for rid in given for index in range(num_prompts * (request.n or 1))]
