"""Owns the state in memory of a job that has not ended. Its driver and the dispatcher decide what happens to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace

from sgl_batch.core.plan_rates import Load
from sgl_batch.jobs.batch_service.engine_shares import EngineShare
from sgl_batch.jobs.batch_service.fair_share import JobShare, weight_of
from sgl_batch.jobs.batch_service.input_reader import InputReader
from sgl_batch.jobs.batch_service.lifecycle import JobStatus
from sgl_batch.jobs.batch_service.line_states import LineStates
from sgl_batch.jobs.job_store.job_rows import JobRow
from sgl_batch.jobs.job_store.result_rows import Totals
from sgl_batch.jobs.progress import ProgressTracker


class ActiveJob:
    """A job that has not ended. `row` is the row that was last written; counts and line states follow each commit."""

    def __init__(self, row: JobRow, clock: Callable[[], float]) -> None:
        self.row = row
        self.totals = Totals(
            completed=row.completed,
            failed=row.failed,
            input_tokens=row.input_tokens,
            output_tokens=row.output_tokens,
            cached_tokens=row.cached_tokens,
            reasoning_tokens=row.reasoning_tokens,
            engine_lines=row.engine_lines,
            engine_input_tokens=row.engine_input_tokens,
            engine_output_tokens=row.engine_output_tokens,
        )
        self.engine_share = EngineShare(seconds=row.engine_s)
        self.lines = LineStates(0)
        self._input_reader: InputReader | None = None
        self.share = JobShare(
            order=row.seq,
            weight=weight_of(json.loads(row.metadata) if row.metadata else None),
            deadline=row.expires_at,
        )
        self.tracker = ProgressTracker(0, clock)
        self.accepts_results = True
        self.num_in_flight = 0
        self.over = asyncio.Event()  # no more lines start: all are done, or the job was cancelled or expired
        self._clock = clock

    @property
    def id(self) -> str:
        """The job's id."""
        return self.row.id

    @property
    def status(self) -> JobStatus:
        """The job's status."""
        return JobStatus(self.row.status)

    @property
    def num_to_start(self) -> int:
        """How many of its lines are neither in flight nor done."""
        return self.lines.total - self.lines.num_done - self.num_in_flight

    @property
    def load_left(self) -> Load:
        """The estimated work of its lines that are not done, once it is validated."""
        row, totals = self.row, self.totals
        whole = Load(
            prompt_tokens=row.estimated_prompt_tokens,
            output_tokens=row.estimated_output_tokens,
            longest_output=row.longest_output,
        )
        return whole.share(1 - (totals.completed + totals.failed) / max(row.total, 1))

    @property
    def runs(self) -> bool:
        """Whether its lines may run: `begin` was called."""
        return self._input_reader is not None

    @property
    def input_reader(self) -> InputReader:
        """What reads its lines, once it runs."""
        assert self._input_reader is not None, f"job {self.id} does not run yet"
        return self._input_reader

    def changed(self, **changes: object) -> None:
        """Take over what was just written to the job's row."""
        self.row = replace(self.row, **changes)  # type: ignore[arg-type]

    def begin(self, input_reader: InputReader) -> None:
        """Let its lines run from now on. Rates and the time left count from here."""
        self._input_reader = input_reader
        self.tracker = ProgressTracker(self.lines.total - self.lines.num_done, self._clock)
        self.end_if_done()

    def committed(self, index: int, totals: Totals) -> None:
        """Count a line whose result line is on the disk."""
        self.lines.finish(index)
        self.totals += totals
        self.tracker.line_done(failed=totals.failed > 0, tokens_in=totals.input_tokens, tokens_out=totals.output_tokens)
        self.end_if_done()

    def end_if_done(self) -> None:
        """Set `over` when all lines are done."""
        if self.lines.num_done == self.lines.total:
            self.over.set()
