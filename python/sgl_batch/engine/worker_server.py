"""Owns the engine's process: its process tree, SGLang's HTTP endpoints, and lines over a socket to its parent.

The parent, the server, has started this process, listens on the socket, and decides when it ends. When the parent is
gone, this process ends by itself and leaves no process behind.
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

from sgl_batch.engine import launch
from sgl_batch.engine.control_routes import control_routes
from sgl_batch.engine.engine_arguments import EngineArguments
from sgl_batch.engine.line_answers import LineAnswers
from sgl_batch.engine.line_channel import serve_lines
from sgl_batch.engine.line_frames import Failed, Frames, FromFront, Ready
from sgl_batch.engine.parent_link import ParentLink
from sgl_batch.engine.process_spec import ProcessSpec
from sgl_batch.errors import EngineError
from sgl_batch.owned_directory import remove_tree
from sgl_batch.sglang_adapter import processes
from sgl_batch.sglang_adapter.received_pickles import read_pickles_strictly
from sgl_batch.startup.plan_inputs import plan_rates

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.5
_END_WITHIN_S = 5.0


class WorkerServer:
    """Serves one engine in this process, from its start to its end."""

    def __init__(self, arguments: EngineArguments, link: ParentLink) -> None:
        self._server_args, self._plan, self._link = arguments.server_args, arguments.plan, link
        self._memory = arguments.memory
        # The parent has made this directory for this engine alone.
        directory = Path(link.socket).parent
        # Tracebacks lie outside the parent's directory, which is removed at its end.
        self._spec = ProcessSpec.begin(
            arguments.config, arguments.start_method, directory, tracebacks=Path(link.directory).parent
        )
        self._launched: processes.Launched | None = None
        self._forward = ""

    def serve(self) -> None:
        """Start the process tree and answer until stopped. Raises EngineError when it does not start.

        While uvicorn serves, it handles SIGTERM. When it has answered all requests, it raises the signal again for the
        handler that is set here.
        """
        read_pickles_strictly()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        signal.signal(signal.SIGHUP, lambda *_: self._end(1))
        try:
            with self._memory:
                launched, self._forward = launch.start_tree(self._server_args, self._spec)
            self._launched = launched
            threading.Thread(target=_end_all_after_parent, args=(self._link.directory,), daemon=True).start()
            # Only the parent has this key: it is on no command line and in no environment.
            self._server_args.api_key, self._server_args.admin_api_key = self._link.api_key, None
            # The parent logs requests, and users do not need this server's address.
            self._server_args.log_level_http = self._server_args.log_level_http or "warning"
            launched.tokenizer_manager.server_drains = True
            manager = launched.tokenizer_manager
            manager.death.is_raised = False
            routes = control_routes(manager)
            processes.serve_http(self._server_args, launched, manager.check_openai, self._lines, routes)
        finally:
            if self._launched is not None:
                self._launched.tokenizer_manager.grammar_process.close()
            self._spec.end()

    @asynccontextmanager
    async def _lines(self) -> AsyncIterator[None]:
        """Answer the parent's lines and watch the engine, while the HTTP server runs."""
        answering = asyncio.create_task(self._answer_or_end())
        try:
            yield
        finally:
            answering.cancel()
            with suppress(asyncio.CancelledError):
                await answering

    async def _answer_or_end(self) -> None:
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
        rates = plan_rates(self._plan)
        await frames.send(Ready(served_model_names=answers.served_model_names, forward=self._forward, plan_rates=rates))
        serving = asyncio.ensure_future(serve_lines(frames, answers))
        death = None
        while death is None and not serving.done():
            await asyncio.wait({serving}, timeout=_LOOK_EVERY_S)
            death = self._death()
        if death is None and serving.result() is None:
            self._end(1)  # the parent is gone
        death = death or self._death() or serving.result()
        assert death is not None, "the engine is dead"
        logger.error("the engine is dead: %s", death)
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving  # it reports the tokens of unanswered lines to the parent
        await frames.send_last(Failed(message=str(death), code=death.code))
        self._end(3)

    async def _http_is_up(self) -> None:
        """Wait until SGLang's endpoints accept connections."""
        while True:
            try:
                _, writer = await asyncio.open_connection(self._server_args.host, self._server_args.port)
            except OSError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                return

    def _death(self) -> EngineError | None:
        """Return why this engine is dead, or None."""
        assert self._launched is not None, "the process tree has started"
        death: EngineError | None = self._launched.tokenizer_manager.death.error
        return death

    def _death_of_lines(self) -> EngineError | None:
        """Return the death without its code: a restarted engine answers the lines, so none gets an error here."""
        death = self._death()
        return None if death is None else EngineError(str(death))

    def _end(self, code: int) -> NoReturn:
        """End this process and all its children at once."""
        processes.kill_process_tree(os.getpid(), include_parent=False)
        self._spec.end()
        if code == 1:
            remove_tree(Path(self._link.directory))
        os._exit(code)


def _end_all_after_parent(directory: str) -> None:
    """Wait until the parent's end of standard input closes. Then end the whole session, if nothing else has."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    time.sleep(_END_WITHIN_S)
    remove_tree(Path(directory))
    os.killpg(0, signal.SIGKILL)
