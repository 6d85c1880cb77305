"""SGLang's endpoints without an engine: they implement `Endpoints` in memory."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

from sgl_batch.api.engine_endpoints import EndpointsGoneError


class ScriptedAnswer:
    def __init__(self, endpoints, status, kind, body):
        self._endpoints, self._body = endpoints, body
        self.status, self.headers = status, ((b"Content-Type", kind),)

    async def chunks(self):
        for chunk in self._body:
            if chunk is None:
                self._endpoints.is_waiting.set()
                await self._endpoints.can_resume.wait()
            else:
                yield chunk
        if self._endpoints.breaks:
            raise EndpointsGoneError("the engine is gone")


class ScriptedEndpoints:
    """Answers requests and notes them. /events is a stream that pauses until `can_resume` is set.

    `refuses` has the statuses of paths that are refused; loading weights changes `version`.
    """

    def __init__(self):
        self.seen, self.refuses, self.aborted = [], {}, []
        self.version = "default"
        self.breaks = False
        self.can_resume, self.is_waiting = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def request(self, asked):
        path = asked.target.partition("?")[0]
        if path != "/model_info":
            self.seen.append((asked.method, asked.target, asked.body))
        is_whole = False
        try:
            yield self._answer(path, asked)
            is_whole = True
        finally:
            if not is_whole:
                self.aborted.append(path)

    def _answer(self, path, asked):
        status = self.refuses.get(path, 200)
        if path == "/events":
            return ScriptedAnswer(self, 200, b"text/event-stream", [b"data: 1\n\n", None, b"data: [DONE]\n\n"])
        if path == "/long":
            return ScriptedAnswer(self, 200, b"text/plain", [b"x" * 500_000] * 8)
        if path == "/update_weights_from_disk" and status == 200:
            self.version = json.loads(asked.body)["model_path"]
        content = {"weight_version": self.version, "message": f"{path} {status}"}
        return ScriptedAnswer(self, status, b"application/json", [json.dumps(content).encode()])
