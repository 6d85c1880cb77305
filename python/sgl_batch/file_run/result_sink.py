"""Turns refused lines and answers into result lines, counts them and hands them to the ordered output.

The run decides what a broken disk means.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from sgl_batch.core.answers import LineResponse
from sgl_batch.file_run.ordered_output import OrderedOutput
from sgl_batch.file_run.run_lengths import RunLengths
from sgl_batch.file_run.run_result import Failures
from sgl_batch.file_run.waiting_results import Finished
from sgl_batch.jobs.progress import ProgressTracker
from sgl_batch.jobs.request_line import RefusedLine, RequestLine
from sgl_batch.jobs.result_lines import (
    answered_result_line,
    error_of,
    internal_error_response,
    refused_result_line,
    result_token,
)
from sgl_batch.jobs.scratch import StorageError

WRITE_AT_ONCE = 512  # lines; keeps the event loop, which the engine shares, responsive


class ResultSink:
    """The way of every finished line into the files.

    The first StorageError goes to `on_storage_error`. From then on nothing is written (`is_broken`).
    """

    def __init__(
        self,
        run_id: str,
        output: OrderedOutput,
        tracker: ProgressTracker,
        on_storage_error: Callable[[StorageError], None],
    ) -> None:
        self.output = output
        self.failures = Failures()
        self.lengths = RunLengths()
        self.is_broken = False
        self._run_id = run_id
        self._tracker = tracker
        self._on_storage_error = on_storage_error
        self._step_is_scheduled = False

    def refuse(self, line: RefusedLine) -> None:
        """Take a line that was refused before the engine saw it."""
        result_line = refused_result_line(self._token(line.index), line.custom_id, line.number, line.error)
        self.failures.add(line.error.code, line.number, line.error.message)
        self._tracker.line_done(failed=True)
        self._commit(Finished(index=line.index, result_line=result_line, failed=True))

    def answer(self, line: RequestLine, response: LineResponse) -> None:
        """Take a line's response, also a failed one."""
        result_line = answered_result_line(self._token(line.index), line.custom_id, line.number, response)
        failed = response.status_code != 200
        if failed:
            error = error_of(response, line.number)
            code = error["code"] or f"status_{response.status_code}"
            self.failures.add(str(code), line.number, str(error["message"]))
        tokens_in, tokens_out = _usage(response.body)
        if not failed:
            choices = response.body.get("choices")
            num_choices = len(choices) if isinstance(choices, list) else 1
            self.lengths.add(line.index, prompt=tokens_in, output=tokens_out, choices=num_choices)
        self._tracker.line_done(failed=failed, tokens_in=tokens_in, tokens_out=tokens_out)
        self._commit(Finished(index=line.index, result_line=result_line, failed=failed))

    def crash(self, line: RequestLine, error: BaseException) -> None:
        """Take a line on which the engine raised an unexpected exception."""
        self.answer(line, internal_error_response(self._token(line.index), error))

    async def write_rest(self) -> None:
        """Write all finished lines, and skip the unfinished ones."""
        try:
            while not self.is_broken and self.output.write_rest(WRITE_AT_ONCE):
                await asyncio.sleep(0)
        except StorageError as error:
            self._break(error)

    async def sync(self) -> None:
        """Wait, off the event loop, until all written lines are on the disk."""
        try:
            await asyncio.to_thread(self.output.sync)
        except StorageError as error:
            self._break(error)

    def _commit(self, finished: Finished) -> None:
        if self.is_broken:
            return  # the run ends, and this line counts as missing
        try:
            self.output.add(finished)
        except StorageError as error:
            self._break(error)
        else:
            if not self._step_is_scheduled:
                self._write_step()

    def _write_step(self) -> None:
        """Write the lines that are ready, a long backlog in steps between which the event loop does other work."""
        self._step_is_scheduled = False
        if self.is_broken:
            return
        try:
            more = self.output.write_ready(WRITE_AT_ONCE)
        except StorageError as error:
            self._break(error)
            return
        if more:
            self._step_is_scheduled = True
            asyncio.get_running_loop().call_soon(self._write_step)

    def _break(self, error: StorageError) -> None:
        if not self.is_broken:
            self.is_broken = True
            self._on_storage_error(error)

    def _token(self, index: int) -> str:
        return result_token(self._run_id, index)


def _usage(body: Mapping[str, object]) -> tuple[int, int]:
    usage = body.get("usage")
    if not isinstance(usage, dict):
        return 0, 0
    return int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
