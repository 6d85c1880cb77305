"""Runs `sgl-batch run`: one input file through one engine, with its files, manifest, summary and exit code."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shlex
import shutil
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from sgl_batch.cli.run.options import STDIN, RunOptions, check_paths, parse_run_options, run_flags
from sgl_batch.cli.run.stop_signals import NotedInterrupt, StopSignals, signals_restored
from sgl_batch.core.decode_choice import MEASURE
from sgl_batch.core.start_choices import line_of
from sgl_batch.errors import ConfigError, SglBatchError
from sgl_batch.file_run.file_run import FileRun, RunSettings
from sgl_batch.file_run.input_sample import sample_table, sample_workload
from sgl_batch.file_run.line_file import LineFile
from sgl_batch.file_run.manifest import Manifest, RunFacts, differences, read_manifest, redacted
from sgl_batch.file_run.ordered_output import OrderedOutput
from sgl_batch.file_run.plan_outcome import compare
from sgl_batch.file_run.plan_refiner import PlanRefiner
from sgl_batch.file_run.resume import EarlierRun, RunFiles, read_earlier
from sgl_batch.file_run.run_cost import PricedDisplay, RunCost
from sgl_batch.file_run.run_result import RunResult, RunStatus
from sgl_batch.file_run.summary import format_summary
from sgl_batch.file_run.text_tokens import by_tokenizer
from sgl_batch.file_run.waiting_results import WaitingResults, forget_kept
from sgl_batch.jobs.line_engine import LineEngine
from sgl_batch.jobs.line_reader import InputScan, check_first_lines, read_lines, scan_input
from sgl_batch.jobs.progress_display import ProgressDisplay, choose_display
from sgl_batch.jobs.request_line import LineRules
from sgl_batch.jobs.scratch import storage_errors
from sgl_batch.jobs.seen_ids import SeenIds
from sgl_batch.jobs.tables.row_lines import write_lines
from sgl_batch.jobs.tables.sources import Table, is_table
from sgl_batch.owned_directory import OwnedDirectory, remove_abandoned
from sgl_batch.planner.refinement import PlanBasis
from sgl_batch.planner.schedule import Prediction
from sgl_batch.planner.workload import Workload

logger = logging.getLogger(__name__)

_INTERRUPTED = "interrupted before the first line; nothing has run"


class BatchEngine(Protocol):
    """What a run needs of the engine as a whole. `num_engines`: of how many engines it consists."""

    loop: asyncio.AbstractEventLoop
    num_engines: int

    def line_engine(self) -> LineEngine:
        """Return the engine as jobs use it."""
        ...

    def plan_manifest(self) -> Mapping[str, Any]:
        """Return the plan for the manifest."""
        ...

    def predict(self, workload: Workload) -> Prediction | None:
        """Return the predicted run of a batch, or None where nothing predicts it."""
        ...

    def plan_basis(self) -> PlanBasis | None:
        """Return what a refinement of the plan is made from, or None where nothing predicts another."""
        ...

    async def refine_plan(self, values: Mapping[str, Any], why: str) -> None:
        """Change the plan at the next boundary. Raises ConfigError for values that cannot work."""
        ...

    def shutdown(self) -> None:
        """End the engine's processes."""
        ...


_LONGEST_COMMAND = 300

StartEngine = Callable[[], BatchEngine]
# Takes the engine's flags, and what estimates the batch.
Estimate = Callable[[Path | None], Workload | None]
PrepareEngine = Callable[[Sequence[str], Estimate], StartEngine]


def prepare_sglang_engine(engine_argv: Sequence[str], workload: Estimate) -> StartEngine:
    """Check the engine's flags and plan for the batch; return the function that starts it. Raises ConfigError."""
    from sgl_batch.engine.engine_arguments import build_arguments

    arguments = build_arguments(engine_argv, near=run_flags(), workload=workload)

    def start() -> BatchEngine:
        from sgl_batch.engine import Engine

        server_args, plan = arguments.server_args, arguments.plan
        with arguments.memory:
            return Engine(server_args=server_args, start_plan=plan, start_method=arguments.start_method)

    return start


def _prepare(options: RunOptions) -> PrepareEngine:
    """Return what prepares the engine that the flags ask for."""
    instances = options.instances
    if instances is None:
        return prepare_sglang_engine

    def prepare(engine_argv: Sequence[str], workload: Estimate) -> StartEngine:
        from sgl_batch.control_plane.instances.file_engines import prepare_instances

        return prepare_instances(instances, engine_argv, options.max_in_flight, workload)

    return prepare


def _interruptible(prepare: PrepareEngine, interrupt: NotedInterrupt) -> PrepareEngine:
    """Return `prepare`, with a Ctrl-C that its imports swallowed raised behind them."""

    def prepared(engine_argv: Sequence[str], workload: Estimate) -> StartEngine:
        start = prepare(engine_argv, workload)
        interrupt.check()
        return start

    return prepared


def run_command(argv: Sequence[str], prepare_engine: PrepareEngine | None = None) -> int:
    """Run the command. Return its exit code. `prepare_engine`: another than the one that the flags ask for."""
    interrupt = NotedInterrupt()
    try:
        options = parse_run_options(argv)
        check_paths(options)
        with interrupt, signals_restored():
            return _Run(options, argv).run(_interruptible(prepare_engine or _prepare(options), interrupt))
    except ConfigError as error:
        return _complain(str(error), 1)
    except KeyboardInterrupt:
        return _complain(_INTERRUPTED, 130)
    except SglBatchError as error:
        return _complain(str(error), 3)
    except Exception:
        if interrupt.was_pressed:
            return _complain(_INTERRUPTED, 130)
        # Python's own exit code for this is 1, which means bad usage here.
        logger.exception("the run ended by a fault of the program")
        return 3


def resume_command(argv: Sequence[str], options: RunOptions) -> str:
    """Return the command that resumes a run: its own command with --resume, shortened where it is long."""
    kept = [one for one in redacted(argv) if one not in ("--overwrite", "--resume")]
    whole = shlex.join(["sgl-batch", "run", *kept, "--resume"])
    if len(whole) <= _LONGEST_COMMAND:
        return whole
    files = ["-i", options.input, "-o", str(options.output if options.table is None else options.table.table)]
    return f"{shlex.join(['sgl-batch', 'run', *files, '--model', options.model])} ... --resume (all flags as before)"


def _settled_before(options: RunOptions) -> list[str]:
    """Return flags with the choices of the earlier run's start, so that the resumed run computes in the same way.

    An option on the command line takes precedence, unless it asks for a measurement.
    """
    if not options.resume or not options.manifest.exists():
        return []
    choices = read_manifest(options.manifest).get("plan", {}).get("choices", {})
    named = _named(options.engine_argv, choices)
    left = {option: choice for option, choice in choices.items() if named.get(option) in (None, MEASURE)}
    return ["--start-choices", json.dumps(left)] if left else []


def _named(engine_argv: Sequence[str], options: Iterable[str]) -> dict[str, str | None]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in options:
        parser.add_argument(f"--{option.replace('_', '-')}", dest=option)
    return vars(parser.parse_known_args(list(engine_argv))[0])


def _complain(message: str, exit_code: int) -> int:
    sys.stderr.write(f"sgl-batch run: error: {message}\n")
    return exit_code


class _Run:
    def __init__(self, options: RunOptions, argv: Sequence[str]) -> None:
        self._options = options
        self._argv = argv
        self._run_id = uuid.uuid4().hex
        self._earlier: EarlierRun | None = None
        self._is_estimated = False
        self._was_completed = False
        self._resumed: tuple[object, ...] = ()
        self._waiting = WaitingResults(options.output)
        self._display: ProgressDisplay = choose_display(options.progress, sys.stderr)
        if options.price_per_hour is not None:
            self._display = PricedDisplay(self._display, options.price_per_hour)

    def run(self, prepare_engine: PrepareEngine) -> int:
        options = self._options
        self._display.note(f"{options.input} -> {self._shown_output}, model {options.model}")
        start_engine = prepare_engine([*options.engine_argv, *_settled_before(options)], self._estimated)
        spool = self._begin_spool()
        try:
            input_path = self._local_input(spool.path)
            scan = scan_input(input_path)
            total = min(scan.num_lines, options.limit or scan.num_lines)
            if total == 0:
                raise ConfigError(f"the input {options.input} has no request line")
            check_first_lines(input_path, options.max_line_bytes)
            self._resume(scan, total)
            if self._is_finished(total):
                return self._nothing_left(total)
            self._display.note(f"{total:,} request lines; starting the engine")
            engine = start_engine()
            try:
                return self._run_on(engine, input_path, scan, total, spool.path)
            finally:
                engine.shutdown()
        finally:
            spool.remove()

    def _estimated(self, tokenizer: Path | None) -> Workload | None:
        """Return the batch as a sample of the input shows it; a pipe is not sampled.

        `tokenizer`: the directory of the model's tokenizer, where it is known.
        """
        options, source = self._options, Path(self._options.input)
        if options.input == STDIN or not source.exists():
            return None
        tokens = by_tokenizer(tokenizer)
        if is_table(source):
            found = sample_table(source, options.rows, options.limit, tokens)
        else:
            found = sample_workload(source, options.limit, tokens)
        self._is_estimated = found is not None
        return found

    def _begin_spool(self) -> OwnedDirectory:
        """Make the directory for temporary files. Raises ConfigError where another run writes the same output now."""
        options, purpose = self._options, str(self._options.output.resolve())
        prefix = f".{options.output.name}.spool-"
        try:
            spool = OwnedDirectory.make(prefix, options.spool_dir, purpose)
        except OSError as error:
            raise ConfigError(
                f"no temporary files can be made in {options.spool_dir}: {error}; name another directory with "
                "--spool-dir, or another -o"
            ) from error
        others = [one for one in remove_abandoned(prefix, options.spool_dir) if one.purpose == purpose]
        if others:
            spool.remove()
            raise ConfigError(
                f"the output {options.output} is being written by another run, process {others[0].pid}; wait for its "
                "end, or name another -o"
            )
        return spool

    def _local_input(self, directory: Path) -> Path:
        """Return the input as a file that can be read twice: a pipe is copied to the spool first."""
        source = Path(self._options.input)
        if self._options.input != STDIN and (source.is_file() or source.is_dir()):
            return self._as_lines(source, directory)
        copy = directory / "input"
        with storage_errors(f"copying the input to {copy}"), copy.open("wb") as file:
            if self._options.input == STDIN:
                shutil.copyfileobj(sys.stdin.buffer, file)
            else:
                with source.open("rb") as pipe:
                    shutil.copyfileobj(pipe, file)
        return self._as_lines(copy, directory)

    def _as_lines(self, source: Path, directory: Path) -> Path:
        """Return the input as JSONL: a table becomes a file of lines in the spool."""
        if not is_table(source):
            return source
        lines = directory / "input.jsonl"
        num_rows = write_lines(Table(source), self._options.rows, lines)
        self._display.note(f"{num_rows:,} rows of the table {self._options.input}")
        return lines

    def _run_on(self, engine: BatchEngine, input_path: Path, scan: InputScan, total: int, directory: Path) -> int:
        options, line_engine = self._options, engine.line_engine()
        facts = self._facts(engine, line_engine, scan, total)
        manifest = Manifest(options.manifest, facts)
        if facts.plan["choices"]:
            self._display.note(f"settled at the start: {line_of(facts.plan['choices'])}")
        if facts.cost is not None and (text := facts.cost.line()):
            self._display.note(f"cost: {text}")
        with ExitStack() as files:
            output = files.enter_context(closing(self._open_output()))
            seen = files.enter_context(closing(SeenIds(directory / "seen.db")))
            manifest.write()
            job = FileRun(
                RunSettings(
                    run_id=self._run_id,
                    total=total,
                    rules=LineRules(
                        served_model_names=line_engine.served_model_names,
                        job_seed=options.seed,
                        max_line_bytes=options.max_line_bytes,
                    ),
                    max_in_flight=engine.num_engines * options.max_in_flight,
                    earlier=self._earlier,
                ),
                read_lines(input_path, options.max_line_bytes),
                line_engine,
                output,
                seen.claim,
                self._display,
                refiner=self._refiner(engine, str(facts.plan["planned"]["source"])),
            )
            try:
                result = engine.loop.run_until_complete(self._drive(job, directory))
            except BaseException as error:
                manifest.abort(f"{type(error).__name__}: {error}")
                raise
        if options.table is not None and result.missing == 0:
            options.table.finish(self._run_id, total)
        if result.status is RunStatus.COMPLETED and result.lengths is not None and result.stats is not None:
            prediction = engine.predict(result.lengths)
            outcome = compare(facts.plan["planned"], prediction, result.stats, result.wall_s)
            if any(one.get("changes") for one in result.refinements):
                outcome = replace(outcome, note="The plan changed during the run; it was predicted as it began.")
            result = replace(result, plan=outcome)
        if facts.cost is not None:
            result = replace(result, cost=facts.cost.at_end(result.engine_time))
        manifest.finish(result)
        self._report(result)
        return result.exit_code

    def _refiner(self, engine: BatchEngine, source: str) -> PlanRefiner:
        return PlanRefiner(
            engine.plan_basis(),
            source,
            engine.refine_plan,
            self._display.note,
            after_s=60 * self._options.refine_after,
            least_left=self._options.refine_least_left,
        )

    @property
    def _shown_output(self) -> Path:
        return self._options.output if self._options.table is None else self._options.table.table

    async def _drive(self, job: FileRun, directory: Path) -> RunResult:
        def quit_at_once() -> None:
            shutil.rmtree(directory, ignore_errors=True)
            os._exit(130)

        stop = asyncio.Event()
        signals = StopSignals(asyncio.get_running_loop(), stop, quit_at_once)
        keeper = asyncio.ensure_future(signals.keep())
        try:
            return await job.run(stop)
        finally:
            keeper.cancel()
            signals.ignore()

    def _open_output(self) -> OrderedOutput:
        options = self._options
        if self._earlier is not None:
            return self._reopen_output(self._earlier)
        # A resumed run without anything left is a new run.
        replace = options.overwrite or options.resume
        if replace and options.table is not None:
            options.table.begin()
        output = LineFile(options.output, overwrite=replace)
        output.create()
        if replace:
            options.errors.unlink(missing_ok=True)
        forget_kept(options.output)
        errors = LineFile(options.errors, overwrite=replace)
        return OrderedOutput(output, errors, self._waiting)

    def _reopen_output(self, earlier: EarlierRun) -> OrderedOutput:
        output, errors = LineFile(self._options.output), LineFile(self._options.errors)
        output.go_on(earlier.num_output)
        errors.go_on(earlier.num_errors)
        return OrderedOutput(output, errors, self._waiting, next_index=earlier.prefix)

    @property
    def _files(self) -> RunFiles:
        return RunFiles(output=self._options.output, errors=self._options.errors)

    def _resume(self, scan: InputScan, total: int) -> None:
        """Find what an earlier run has done. Raises ConfigError where its input, model or seed was another."""
        options = self._options
        if not options.resume:
            return
        if not options.manifest.exists():
            left = (options.output, options.errors, self._shown_output)
            if any(path.exists() and path.stat().st_size for path in left):
                raise ConfigError(
                    f"{options.output} cannot be resumed: its manifest {options.manifest} is missing, which says what "
                    "the earlier run was; start anew with --overwrite"
                )
            return
        before = read_manifest(options.manifest)
        found = differences(before, scan, options.model, options.seed)
        if found and ("input" in found or not options.force):
            what = "; ".join(f"{name} was {text}" for name, text in found.items())
            remedy = "start anew with --overwrite" + ("" if "input" in found else ", or go on with --force")
            raise ConfigError(f"{options.output} cannot be resumed, because the earlier run differs: {what}; {remedy}")
        self._run_id = str(before["run_id"])
        if options.table is not None:
            options.table.restore(self._run_id)
        self._earlier = read_earlier(self._files, self._run_id, total, self._waiting, retry_failed=options.retry_failed)
        self._was_completed = before["status"] == RunStatus.COMPLETED.value
        step = {"started_at": before["started_at"], "status": before["status"], "kept": self._earlier.num_done}
        self._resumed = (*before.get("resumed", ()), {**step, "differences": found})
        self._display.note(
            f"going on: {self._earlier.num_done:,} lines are done, {total - self._earlier.num_done:,} are not"
        )

    def _is_finished(self, total: int) -> bool:
        """Return whether the earlier run has completed and its files still have all lines."""
        return self._was_completed and self._earlier is not None and self._earlier.prefix == total

    def _nothing_left(self, total: int) -> int:
        assert self._earlier is not None, "an earlier run has done all"
        self._waiting.remove()
        if self._options.table is not None:
            self._options.table.finish(self._run_id, total)
        failed = self._earlier.failed
        more = f", {failed:,} of them failed (--retry-failed runs those again)" if failed else ""
        self._display.note(f"nothing is left to do: all {total:,} lines are done{more}. Output: {self._shown_output}")
        return 2 if failed else 0

    def _facts(self, engine: BatchEngine, line_engine: LineEngine, scan: InputScan, total: int) -> RunFacts:
        options, plan = self._options, engine.plan_manifest()
        left = total - (self._earlier.num_done if self._earlier else 0)
        price, predicted = options.price_per_hour, total if self._is_estimated else None
        return RunFacts(
            run_id=self._run_id,
            argv=["sgl-batch", "run", *self._argv],
            options={
                "output": self._shown_output,
                "errors": options.errors if options.table is None else None,
                "limit": options.limit,
                "max_in_flight": options.max_in_flight,
                "max_line_bytes": options.max_line_bytes,
                "engine_argv": redacted(options.engine_argv),
            },
            input_path=options.input,
            scan=scan,
            model_path=options.model,
            served_model_names=line_engine.served_model_names,
            job_seed=options.seed,
            plan=plan,
            resumed=self._resumed,
            cost=None if price is None else RunCost.begin(price, plan["planned"], left, predicted),
        )

    def _report(self, result: RunResult) -> None:
        options = self._options
        is_whole = options.table is not None and result.missing == 0
        shown = self._shown_output if is_whole else options.output
        lines = [format_summary(result), f"Output: {shown}", f"Manifest: {options.manifest}"]
        if result.failed and not is_whole:
            lines.insert(2, f"Errors: {options.errors}")
        if result.status is not RunStatus.COMPLETED:
            lines.append(
                f"sgl-batch run: {result.status.value}: {result.message}. {result.missing:,} of "
                f"{result.total:,} lines have neither an output nor an error; finished lines are written. "
                f"Go on with: {resume_command(self._argv, options)}"
            )
        for line in lines:
            self._display.note(line)
