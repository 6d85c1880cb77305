"""A replacement for the engine's process, without an engine: the bodies of lines control what it does.

A body may say {"exit": code}, {"hang": true}, {"pause": true}, {"die": "words"} or {"child": bytes}, for a child that
holds so much memory. Any other body is returned as the answer. As a program:
`python scripted_worker.py [--refuse WORDS | --fail WORDS | --exit CODE] --host H --port P`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping

from sgl_batch.core.answers import EngineStats, LineResponse
from sgl_batch.core.partial_output import PartialOutput
from sgl_batch.engine.line_channel import serve_lines
from sgl_batch.engine.line_frames import Failed, Frames, FromFront, Ready
from sgl_batch.engine.parent_link import ParentLink, read_link
from sgl_batch.errors import BAD_USAGE, EngineError

COMMAND = (sys.executable, __file__)


class ScriptedEngine:
    """The engine; it counts its answers."""

    def __init__(self) -> None:
        self.num_answered = self.num_queued = 0
        self.paused = False

    async def respond(self, url: str, body: Mapping[str, object], partial_output: PartialOutput) -> LineResponse:
        if "exit" in body:
            os._exit(int(str(body["exit"])))
        if "die" in body:
            raise EngineError(str(body["die"]), code="some_code")
        self.paused = bool(body.get("pause", self.paused))
        if body.get("hang"):
            self.num_queued += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.num_queued -= 1
        child = await start_child(int(str(body["child"]))) if "child" in body else None
        self.num_answered += 1
        return LineResponse(status_code=200, request_id="id", body={**body, "pid": os.getpid(), "child": child})

    def update_partial_outputs(self) -> None:
        """Do nothing: it generates no tokens."""

    async def stats(self) -> EngineStats:
        counters, sequences = {"answered": self.num_answered}, {"QUEUED": self.num_queued}
        return EngineStats(counters=counters, sequences=sequences, paused=self.paused)


async def start_child(num_bytes: int) -> int:
    """Start a child with so much memory, and return its process id."""
    code = f"import time; held = bytearray(b'x') * {num_bytes}; print(flush=True); time.sleep(600)"
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None
    await child.stdout.readline()
    return child.pid


async def serve(link: ParentLink) -> int:
    frames: Frames[FromFront] = Frames(*await asyncio.open_unix_connection(link.socket), FromFront)
    await frames.send(Ready(served_model_names=("tiny",)))
    death = await serve_lines(frames, ScriptedEngine())
    if death is None:
        return 1
    await frames.send_last(Failed(message=str(death), code=death.code))
    return 3


def main() -> int:
    parser = argparse.ArgumentParser()
    for flag in ("--refuse", "--fail", "--exit", "--host", "--port"):
        parser.add_argument(flag)
    args = parser.parse_args()
    link = read_link()
    if args.exit is not None:
        return int(args.exit)
    if args.refuse is not None:
        link.report_failure(args.refuse, BAD_USAGE)
        return 1
    if args.fail is not None:
        link.report_failure(args.fail, None)
        return 3
    return asyncio.run(serve(link))


if __name__ == "__main__":
    sys.exit(main())
