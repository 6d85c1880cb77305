"""Runs `sgl-batch jobs`: each command from its flags to its exit code."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from sgl_batch.cli.jobs.options import STDIN, STDOUT, check_target, errors_path, parse_jobs_options
from sgl_batch.cli.jobs.prices import at_price
from sgl_batch.cli.run.options import row_rules
from sgl_batch.errors import ConfigError, SglBatchError
from sgl_batch.jobs.line_reader import UTF8_BOM
from sgl_batch.jobs.tables.results import is_table_name
from sgl_batch.jobs.tables.sources import is_table, need_pyarrow

if TYPE_CHECKING:
    from sgl_batch.cli.jobs.client import Job, JobsClient


def jobs_command(argv: Sequence[str]) -> int:
    """Run the command. Return its exit code."""
    job_id: str | None = None
    try:
        args = parse_jobs_options(argv)
        job_id = getattr(args, "id", None)
        # Importing the openai package takes most of a second: help and mistakes do not wait for it.
        from sgl_batch.cli.jobs.client import JobsClient, JobsError

        try:
            return _COMMANDS[args.command](JobsClient(args.base_url, args.api_key), args)
        except JobsError as error:
            return _complain(str(error), error.exit_code)
    except ConfigError as error:
        return _complain(str(error), 1)
    except SglBatchError as error:
        return _complain(str(error), 3)
    except BrokenPipeError:
        return 0  # the reader of our output has closed it
    except KeyboardInterrupt:
        return _complain(
            "interrupted; if the job was made, it goes on (sgl-batch jobs list)"
            if job_id is None
            else f"interrupted; the job goes on (sgl-batch jobs watch {job_id})",
            130,
        )


def _complain(message: str, exit_code: int) -> int:
    sys.stderr.write(f"sgl-batch jobs: error: {message}\n")
    return exit_code


def _submit(client: JobsClient, args: argparse.Namespace) -> int:
    _check_outputs(args)
    with tempfile.TemporaryDirectory(prefix="sgl-batch-jobs-") as directory:
        path = Path(args.file)
        if args.file == STDIN:
            path = Path(directory) / "stdin.jsonl"
            with path.open("wb") as copy:
                shutil.copyfileobj(sys.stdin.buffer, copy)
        if is_table(path):
            from sgl_batch.cli.jobs.tables import lines_of

            path = lines_of(path, row_rules(args, args.model or client.only_model()), Path(directory))
        with path.open("rb") as file:
            endpoint = args.endpoint or _first_endpoint(file, args.file)
            file.seek(0)
            file_id = client.upload(path.name, file)
    body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": args.window}
    return _create(client, args, body)


def _continue(client: JobsClient, args: argparse.Namespace) -> int:
    _check_outputs(args)
    body = {"continue_from": args.id}
    return _create(client, args, body | ({"completion_window": args.window} if args.window else {}))


def _create(client: JobsClient, args: argparse.Namespace, body: Mapping[str, Any]) -> int:
    made = client.create({**body, **({"metadata": args.metadata} if args.metadata else {})}, args.idempotency_key)
    job = at_price(made, args.price_per_hour)
    is_waited_for = args.wait or args.watch or args.output is not None
    if not (args.json and is_waited_for):  # with --json, the job is printed once, at its end
        _print(job if args.json else job["id"])
    if not is_waited_for:
        return 0
    args.id = job["id"]
    return _follow(client, args, is_shown=args.watch)


def _watch(client: JobsClient, args: argparse.Namespace) -> int:
    args.output = None
    return _follow(client, args, is_shown=True)


def _follow(client: JobsClient, args: argparse.Namespace, *, is_shown: bool) -> int:
    from sgl_batch.cli.jobs.cards import exit_code, last_words
    from sgl_batch.cli.jobs.watching import choose_watch_display, watch

    display = choose_watch_display(sys.stderr) if is_shown else None
    job = watch(lambda: at_price(client.get(args.id), args.price_per_hour), display)
    if args.json:
        _print(job)
    else:
        sys.stderr.write(last_words(job) + "\n")
    if args.output is not None:
        _fetch_all(client, job, Path(args.output), partial=False, with_errors=True)
    return exit_code(job)


def _list(client: JobsClient, args: argparse.Namespace) -> int:
    from sgl_batch.cli.jobs.cards import table

    jobs = (at_price(job, args.price_per_hour) for job in client.jobs(None if args.all else args.limit))
    if args.json:
        for job in jobs:
            sys.stdout.write(json.dumps(job) + "\n")
        return 0
    found = list(jobs)
    sys.stdout.write(table(found, time.time()) + "\n" if found else f"{args.base_url} has no jobs\n")
    return 0


def _get(client: JobsClient, args: argparse.Namespace) -> int:
    from sgl_batch.cli.jobs.cards import card

    job = at_price(client.get(args.id), args.price_per_hour)
    _print(job if args.json else card(job, time.time()))
    return 0


def _cancel(client: JobsClient, args: argparse.Namespace) -> int:
    job = client.cancel(args.id)
    _print(job if args.json else f"{job['id']} {job.get('status')}")
    return 0


def _download(client: JobsClient, args: argparse.Namespace) -> int:
    from sgl_batch.cli.jobs.downloads import copy, file_of

    args.output = args.output or f"{args.id}.jsonl"
    if args.output == STDOUT:
        if args.errors:
            raise ConfigError("--errors needs an output file to name its file after; give -o PATH instead of -o -")
        file_id = file_of(client.get(args.id), "output", partial=args.partial)
        if file_id is not None:
            copy(client.content, file_id, sys.stdout.buffer, lambda *_: None)
            sys.stdout.buffer.flush()
        return 0
    _check_outputs(args)
    job = client.get(args.id)
    _fetch_all(client, job, Path(args.output), partial=args.partial, with_errors=args.errors)
    return 0


def _fetch_all(client: JobsClient, job: Job, output: Path, *, partial: bool, with_errors: bool) -> None:
    if is_table_name(output):
        from sgl_batch.cli.jobs.downloads import BytesShown, file_of
        from sgl_batch.cli.jobs.tables import download_table

        if not any(file_of(job, kind, partial=partial) for kind in ("output", "error")):
            sys.stderr.write(f"job {job['id']} has no output: it has answered no line\n")
            return

        shown = BytesShown(sys.stderr)
        num_rows = download_table(client, job, output, shown, partial=partial)
        shown.end()
        sys.stderr.write(f"Output: {output} ({num_rows:,} rows)\n")
        return
    _fetch(client, job, "output", output, partial=partial)
    if with_errors:
        _fetch(client, job, "error", errors_path(output), partial=partial)


def _fetch(client: JobsClient, job: Job, kind: str, target: Path, *, partial: bool) -> None:
    from sgl_batch.cli.jobs.downloads import BytesShown, download, file_of

    file_id = file_of(job, kind, partial=partial)
    if file_id is None:
        if kind == "output":
            sys.stderr.write(f"job {job['id']} has no output: no line has succeeded\n")
        return
    shown = BytesShown(sys.stderr)
    num_bytes = download(client.content, file_id, target, shown)
    shown.end()
    sys.stderr.write(f"{'Output' if kind == 'output' else 'Errors'}: {target} ({num_bytes:,} bytes)\n")


def _check_outputs(args: argparse.Namespace) -> None:
    """Check, before any request, that the output files can be written. Raises ConfigError."""
    if args.output is None:
        return
    output = Path(args.output)
    check_target(output, overwrite=args.overwrite)
    if is_table_name(output):
        need_pyarrow(f"writing the table {output}")
        if args.command == "download" and args.errors:
            raise ConfigError(f"failed lines are rows of the table {output}; leave --errors out")
    elif args.command != "download" or args.errors:
        check_target(errors_path(output), overwrite=args.overwrite)


def _first_endpoint(file: BinaryIO, name: str) -> str:
    """Return the url of the first line that is not blank."""
    for line in file:
        text = line.removeprefix(UTF8_BOM).strip()
        if text:
            break
    else:
        raise ConfigError(f"the input {name} has no request line")
    try:
        url = json.loads(text).get("url")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"the first line of {name} is not a request as a JSON object ({error}); give --endpoint"
        ) from error
    if not isinstance(url, str):
        raise ConfigError(f'the first line of {name} has no "url"; give --endpoint')
    return url


def _print(what: Any) -> None:
    sys.stdout.write((what if isinstance(what, str) else json.dumps(what, indent=2)) + "\n")
    sys.stdout.flush()


_COMMANDS: Mapping[str, Callable[[JobsClient, argparse.Namespace], int]] = {
    "submit": _submit,
    "list": _list,
    "get": _get,
    "cancel": _cancel,
    "download": _download,
    "watch": _watch,
    "continue": _continue,
}
