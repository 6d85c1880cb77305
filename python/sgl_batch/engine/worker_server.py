"""Owns the process that has the engine: its tree and SGLang's HTTP endpoints, and lines over a socket to its front.

The front started it, listens on the socket, and decides when it ends; when the front is gone it ends by itself and
leaves no process behind.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NoReturn

from sgl_batch.config import BatchConfig
from sgl_batch.engine import launch
from sgl_batch.engine.control_routes import control_routes
from sgl_batch.engine.line_answers import LineAnswers
from sgl_batch.engine.line_channel import serve_lines
from sgl_batch.engine.line_frames import Failed, Frames, FromFront, Ready
from sgl_batch.engine.parent_link import ParentLink
from sgl_batch.engine.process_spec import ProcessSpec
from sgl_batch.errors import EngineError
from sgl_batch.owned_directory import remove_tree
from sgl_batch.sglang_adapter import processes
from sgl_batch.sglang_adapter.received_pickles import read_pickles_strictly
from sgl_batch.sglang_adapter.types.messages import ServerArgs

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.5
_END_WITHIN_S = 5.0


class WorkerServer:
    """One engine's life in this process."""

    def __init__(self, server_args: ServerArgs, config: BatchConfig, start_method: str, link: ParentLink) -> None:
        self._server_args, self._link = server_args, link
        # The front has made this directory for this engine alone.
        directory = Path(link.socket).parent
        # The front's own directory goes with it; what is beside it stays.
        self._run = ProcessSpec.begin(config, start_method, directory, tracebacks=Path(link.directory).parent)
        self._launched: processes.Launched | None = None
        self._forward = ""

    def serve(self) -> None:
        """Start the process tree and answer until stopped. Raises EngineError when it does not start.

        Uvicorn takes SIGTERM over while it serves, and passes it on to this handler when it has answered everything.
        """
        read_pickles_strictly()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        signal.signal(signal.SIGHUP, lambda *_: self._end(1))
        try:
            launched, self._forward = launch.start_tree(self._server_args, self._run)
            self._launched = launched
            threading.Thread(target=_end_all_after_front, args=(self._link.directory,), daemon=True).start()
            # Nobody but the front has this key. It was in no command line, and is in no environment.
            self._server_args.api_key, self._server_args.admin_api_key = self._link.api_key, None
            # The front tells of requests; this server's address is no user's business.
            self._server_args.log_level_http = self._server_args.log_level_http or "warning"
            launched.tokenizer_manager.server_drains = True
            manager = launched.tokenizer_manager
            manager.death.is_raised = False
            routes = control_routes(manager)
            processes.serve_http(self._server_args, launched, manager.check_openai, self._lines, routes)
        finally:
            if self._launched is not None:
                self._launched.tokenizer_manager.grammar_process.close()
            self._run.end()

    @asynccontextmanager
    async def _lines(self) -> AsyncIterator[None]:
        """Beside the HTTP server: answer the front's lines, and look whether the engine lives."""
        talking = asyncio.create_task(self._talk())
        try:
            yield
        finally:
            talking.cancel()
            with suppress(asyncio.CancelledError):
                await talking

    async def _talk(self) -> None:
        try:
            await self._answer_lines()
        except Exception:
            logger.exception("the engine's process ends by a fault of the program")
            self._end(3)

    async def _answer_lines(self) -> None:
        launched = self._launched
        assert launched is not None, "the process tree has started"
        await self._http_is_up()
        frames: Frames[FromFront] = Frames(*await asyncio.open_unix_connection(self._link.socket), FromFront)
        answers = LineAnswers(launched.tokenizer_manager, launched.template_manager, self._death_of_lines)
        await frames.send(Ready(served_model_names=answers.served_model_names, forward=self._forward))
        serving = asyncio.ensure_future(serve_lines(frames, answers))
        death = None
        while death is None and not serving.done():
            await asyncio.wait({serving}, timeout=_LOOK_EVERY_S)
            death = self._death()
        if death is None and serving.result() is None:
            self._end(1)  # the front is gone
        death = death or self._death() or serving.result()
        assert death is not None, "the engine is dead"
        logger.error("the engine is dead: %s", death)
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving  # it tells the front what lines have generated
        await frames.send(Failed(message=str(death), code=death.code))
        self._end(3)

    async def _http_is_up(self) -> None:
        """Wait until SGLang's endpoints can be reached."""
        while True:
            try:
                _, writer = await asyncio.open_connection(self._server_args.host, self._server_args.port)
            except OSError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                return

    def _death(self) -> EngineError | None:
        """Why this engine cannot answer any more."""
        assert self._launched is not None, "the process tree has started"
        death: EngineError | None = self._launched.tokenizer_manager.death.error
        return death

    def _death_of_lines(self) -> EngineError | None:
        """What a line gets then. Whatever it was, a restarted engine answers it: no line is told a final word here."""
        death = self._death()
        return None if death is None else EngineError(str(death))

    def _end(self, code: int) -> NoReturn:
        """End this process and all of its own, at once."""
        processes.kill_process_tree(os.getpid(), include_parent=False)
        self._run.end()
        if code == 1:
            remove_tree(Path(self._link.directory))
        os._exit(code)


def _end_all_after_front(directory: str) -> None:
    """Wait for the front's end of standard input to close; then end the whole session, should nothing else do so."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    time.sleep(_END_WITHIN_S)
    remove_tree(Path(directory))
    os.killpg(0, signal.SIGKILL)
