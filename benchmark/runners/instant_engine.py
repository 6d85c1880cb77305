"""Owns an engine process that computes nothing: it answers each line at once, with a chat completion of a usual size.

    python benchmark/runners/instant_engine.py --host H --port P

It speaks to its parent as `sgl_batch.launch_engine` does.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping

from sgl_batch.core.answers import EngineStats, LineResponse
from sgl_batch.core.partial_output import PartialOutput
from sgl_batch.engine.line_channel import serve_lines
from sgl_batch.engine.line_frames import Frames, FromFront, Ready
from sgl_batch.engine.parent_link import read_link

ANSWER = {
    "id": "chatcmpl",
    "object": "chat.completion",
    "created": 1700000000,
    "model": "instant",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "The answer is 42. " * 12, "tool_calls": None},
            "logprobs": None,
            "finish_reason": "length",
            "matched_stop": None,
        }
    ],
    "usage": {"prompt_tokens": 85, "completion_tokens": 64, "total_tokens": 149},
    "metadata": {"weight_version": "default"},
}
"""The body of each answer: 0.5 KB as JSON."""


class InstantEngine:
    """Counts what it answers."""

    def __init__(self) -> None:
        self._num_answered = 0

    async def respond(self, url: str, body: Mapping[str, object], partial_output: PartialOutput) -> LineResponse:
        """Return `ANSWER` under a request id that no other answer has."""
        self._num_answered += 1
        return LineResponse(status_code=200, request_id=f"req_{os.getpid()}_{self._num_answered}", body=ANSWER)

    def update_partial_outputs(self) -> None:
        """Do nothing: it generates no tokens."""

    async def stats(self) -> EngineStats:
        """Return how many lines were answered."""
        return EngineStats(counters={"answered": self._num_answered})


async def _serve() -> int:
    frames: Frames[FromFront] = Frames(*await asyncio.open_unix_connection(read_link().socket), FromFront)
    await frames.send(Ready(served_model_names=("instant",)))
    await serve_lines(frames, InstantEngine())
    return 1


if __name__ == "__main__":
    sys.exit(asyncio.run(_serve()))
