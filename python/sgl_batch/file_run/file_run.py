"""Drives one run from its input lines to its output files: admission, answers, stop and periodic work.

The engine decides what a line's answer is, and request_line what is refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from sgl_batch.core.answers import EngineStats
from sgl_batch.errors import EngineError
from sgl_batch.file_run.ordered_output import OrderedOutput
from sgl_batch.file_run.plan_refiner import PlanRefiner, RunProgress
from sgl_batch.file_run.result_sink import ResultSink
from sgl_batch.file_run.resume import EarlierRun
from sgl_batch.file_run.run_result import RunResult, RunStatus
from sgl_batch.file_run.stats_poller import StatsPoller
from sgl_batch.jobs.line_engine import LineEngine
from sgl_batch.jobs.line_reader import RawLine
from sgl_batch.jobs.progress import ProgressTracker
from sgl_batch.jobs.progress_display import ProgressDisplay
from sgl_batch.jobs.request_line import ClaimId, LineRules, RequestLine, claim_custom_id, parse_request_line
from sgl_batch.jobs.scratch import StorageError

logger = logging.getLogger(__name__)

DEFAULT_MAX_IN_FLIGHT = 2048
MAX_IN_FLIGHT_BYTES = 64 << 20  # of input lines; their parsed bodies take several times as much
STATS_WAIT_S = 10.0
STATS_WAIT_HALTED_S = 3.0  # shorter: a person waits for the end, or the engine is broken
STATS_EVERY_S = 2.0
CANCEL_WAIT_S = 10.0
SYNC_EVERY_S = 5.0
_REFUSED_AT_ONCE = 64  # lines between two turns of the event loop, which the engine shares


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The settings of a run. `total` is how many lines it reads."""

    run_id: str
    total: int
    rules: LineRules
    max_in_flight: int = DEFAULT_MAX_IN_FLIGHT
    tick_s: float = 0.5
    earlier: EarlierRun | None = None  # its lines are not run again


class FileRun:
    """One run over one input. Every line gets exactly one output or error line, unless the run is halted."""

    def __init__(
        self,
        settings: RunSettings,
        lines: Iterable[RawLine],
        engine: LineEngine,
        output: OrderedOutput,
        claim_id: ClaimId,
        display: ProgressDisplay,
        clock: Callable[[], float] = time.monotonic,
        refiner: PlanRefiner | None = None,
    ) -> None:
        self._settings = settings
        self._refiner = refiner
        self._lines = lines
        self._engine = engine
        self._claim_id = claim_id
        self._display = display
        self._clock = clock
        earlier = settings.earlier
        self._tracker = ProgressTracker(
            settings.total, clock, ok=earlier.ok if earlier else 0, failed=earlier.failed if earlier else 0
        )
        self._sink = ResultSink(settings.run_id, output, self._tracker, self._storage_failed)
        if earlier is not None:
            self._sink.failures = earlier.failures
        self._stats = StatsPoller(engine)
        self._baseline: EngineStats | None = None
        self._engine_is_dead = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_flight_bytes = 0
        self._not_synced: list[str] = []  # request ids of answers that are perhaps not on the disk yet
        self._room = asyncio.Event()
        self._halted: tuple[RunStatus, str] | None = None

    async def run(self, stop: asyncio.Event) -> RunResult:
        """Run to the end, or until `stop` is set. Then finished lines are written, and the others are missing."""
        start_s = self._clock()
        over = asyncio.Event()
        self._display.update(self._tracker.snapshot())
        watch, tick = asyncio.ensure_future(self._watch(stop)), asyncio.ensure_future(self._tick_until(over))
        try:
            self._baseline = await self._read_stats(STATS_WAIT_S)
            await self._admit_all()
            await self._wait_for_answers()
        finally:
            over.set()
            watch.cancel()
            await asyncio.wait({watch, tick})
            if self._refiner is not None:
                await self._refiner.close()
        tick.result()
        await self._sink.write_rest()
        await self._sync()
        stats = await self._read_stats(STATS_WAIT_S if self._halted is None else STATS_WAIT_HALTED_S)
        self._stats.abandon()
        self._display.close(self._tracker.snapshot())
        return self._result(self._clock() - start_s, stats)

    async def _admit_all(self) -> None:
        try:
            num_read = await self._admit_lines()
        except StorageError as error:
            self._storage_failed(error)
            return
        if num_read < self._settings.total:
            await self._wait_for_answers()
            self._halt(
                RunStatus.FAILED,
                f"the input ended after {num_read:,} of {self._settings.total:,} lines: it changed meanwhile",
            )

    async def _admit_lines(self) -> int:
        """Refuse or start each line in turn. Return how many were read."""
        num_read = num_refused = 0
        done = self._settings.earlier.done if self._settings.earlier else b""
        for raw in islice(self._lines, self._settings.total):
            if self._halted:
                break
            num_read += 1
            if done and done[raw.index]:
                claim_custom_id(raw, self._settings.rules, self._claim_id)
                if num_read % _REFUSED_AT_ONCE == 0:
                    await asyncio.sleep(0)
                continue
            line = parse_request_line(raw, self._settings.rules, self._claim_id)
            if isinstance(line, RequestLine):
                await self._wait_for_room(line.num_bytes)
                self._start(line)
                continue
            self._sink.refuse(line)
            num_refused += 1
            if num_refused % _REFUSED_AT_ONCE == 0:
                await asyncio.sleep(0)
        return num_read

    async def _wait_for_room(self, num_bytes: int) -> None:
        while self._tasks and not self._halted:
            fits = self._in_flight_bytes + num_bytes <= MAX_IN_FLIGHT_BYTES
            if fits and len(self._tasks) < self._settings.max_in_flight:
                return
            self._room.clear()
            await self._room.wait()

    def _start(self, line: RequestLine) -> None:
        if self._halted:
            return
        task = asyncio.ensure_future(self._answer(line))
        self._tasks.add(task)
        self._in_flight_bytes += line.num_bytes
        task.add_done_callback(lambda ended: self._ended(line, ended))

    async def _answer(self, line: RequestLine) -> None:
        try:
            response = await self._engine.respond(line.url, line.body)
        except EngineError as error:
            self._engine_died(error)
        else:
            self._sink.answer(line, response)
            self._not_synced.append(response.request_id)

    def _ended(self, line: RequestLine, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._in_flight_bytes -= line.num_bytes
        self._room.set()
        if task.cancelled():
            self._halt(RunStatus.FAILED, f"line {line.number} was cancelled inside the engine")
        elif (error := task.exception()) is not None:
            # A fault of the program with this line: it fails, and the other lines go on.
            logger.error("line %d: the engine raised", line.number, exc_info=error)
            self._sink.crash(line, error)

    async def _wait_for_answers(self) -> None:
        while self._tasks and not self._halted:
            self._room.clear()
            await self._room.wait()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=CANCEL_WAIT_S)

    def _halt(self, status: RunStatus, message: str) -> None:
        """Stop admitting lines and give up those in flight. The first reason stands."""
        if self._halted is None:
            self._halted = (status, message)
            self._room.set()
            for task in tuple(self._tasks):
                task.cancel()

    def _engine_died(self, error: EngineError) -> None:
        self._engine_is_dead = True
        self._halt(RunStatus.FAILED, f"the engine died: {error}")

    def _storage_failed(self, error: StorageError) -> None:
        self._display.note(f"Error: {error}")
        self._halt(RunStatus.FAILED, str(error))

    async def _watch(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._display.note(
            f"Stopping: {len(self._tasks):,} lines in flight are given up, finished lines are written "
            "(stop once more to quit at once)."
        )
        self._halt(RunStatus.INTERRUPTED, "stopped by a signal")

    async def _tick_until(self, over: asyncio.Event) -> None:
        synced_s = counted_s = self._clock()
        while not over.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), self._settings.tick_s)
            now = self._clock()
            if now - counted_s >= STATS_EVERY_S:
                counted_s = now
                self._look_at(await self._read_stats(0.0))
            if now - synced_s >= SYNC_EVERY_S:
                synced_s = now
                await self._sync()
            self._display.update(self._tracker.snapshot(len(self._tasks)))

    async def _sync(self) -> None:
        written, self._not_synced = self._not_synced, []
        await self._sink.sync()
        if not self._sink.is_broken:
            self._engine.acknowledge(written)

    async def _read_stats(self, wait_s: float) -> EngineStats | None:
        if self._engine_is_dead:
            return None
        try:
            return await (self._stats.poll_new(wait_s) if wait_s else self._stats.poll(wait_s))
        except EngineError as error:
            self._engine_died(error)
            return None

    def _look_at(self, stats: EngineStats | None) -> None:
        if stats is None or self._baseline is None:
            return
        if self._refiner is not None:
            done, lengths = self._tracker.done, self._sink.lengths.workload()
            answered = self._tracker.ok - (self._settings.earlier.ok if self._settings.earlier else 0)
            left = self._settings.total - done
            self._refiner.observe(stats, RunProgress(left=left, answered=answered, lengths=lengths))
        counters = stats.since(self._baseline).counters
        if "prompt_tokens" in counters and "output_tokens" in counters:
            self._tracker.live_tokens(
                int(counters["prompt_tokens"] + counters.get("prompt_tokens_shared", 0)), int(counters["output_tokens"])
            )

    def _result(self, wall_s: float, stats: EngineStats | None) -> RunResult:
        status, message = self._halted or (RunStatus.COMPLETED, None)
        num_ok, num_failed = self._sink.output.num_ok, self._sink.output.num_failed
        if num_ok + num_failed == self._settings.total and not self._sink.is_broken:
            status, message = RunStatus.COMPLETED, None  # it was halted when all lines were finished
        if stats is not None and self._baseline is not None:
            stats = stats.since(self._baseline)
        return RunResult(
            status=status,
            message=message,
            total=self._settings.total,
            ok=num_ok,
            failed=num_failed,
            wall_s=wall_s,
            tokens_in=self._tracker.tokens_in,
            tokens_out=self._tracker.tokens_out,
            failures=self._sink.failures.by_code,
            stats=stats,
            lengths=self._sink.lengths.workload(),
            kept=self._settings.earlier.num_done if self._settings.earlier else 0,
            refinements=tuple(self._refiner.records) if self._refiner is not None else (),
        )
