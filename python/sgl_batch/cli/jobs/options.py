"""Owns the command line of `sgl-batch jobs`: its commands, flags and their checks. It imports nothing slow."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sgl_batch.cli.run.options import UsageParser, add_table_flags, check_rows, row_rules
from sgl_batch.errors import ConfigError
from sgl_batch.jobs.cost import add_price_flag, parse_price

DEFAULT_BASE_URL = "http://127.0.0.1:30000/v1"
STDIN = STDOUT = "-"
_DESCRIPTION = """\
Send jobs to a server: upload a file of requests, follow the job, fetch the answers. The server is started with
`sgl-batch serve`, or is any other server with OpenAI's Files and Batches API.
"""
_EPILOG = f"""\
example, step by step:
  sgl-batch serve --model-path ./my-moe --served-model-name my-moe
  sgl-batch jobs submit questions.jsonl            prints the job's id
  sgl-batch jobs watch ID                          shows progress until the job has ended
  sgl-batch jobs download ID -o answers.jsonl --errors
or in one command:
  sgl-batch jobs submit questions.jsonl --watch -o answers.jsonl

The server: --base-url, else OPENAI_BASE_URL, else {DEFAULT_BASE_URL}. The key: --api-key, else OPENAI_API_KEY.

exit codes:
  0    done; for commands that wait for the job (watch, --wait, --watch, -o): every line has its answer
  1    bad usage, or the server refused the request
  2    the job has finished, and some lines failed
  3    the job failed, expired or was cancelled, or the server cannot be reached
  130  stopped by Ctrl-C; the job goes on
"""
_EXAMPLES = {
    "submit": """\
examples:
  sgl-batch jobs submit in.jsonl
  sgl-batch jobs submit in.jsonl --window 30m --priority 5 --metadata name=nightly --metadata owner=ann
  make_requests | sgl-batch jobs submit - --watch -o out.jsonl
  sgl-batch jobs submit questions.parquet --chat-column question --watch -o answers.parquet
  sgl-batch jobs submit in.jsonl --idempotency-key nightly-7     run twice, it makes one job
""",
    "list": "examples:\n  sgl-batch jobs list --limit 5\n  sgl-batch jobs list --all --json | jq -r .id\n",
    "get": "example:\n  sgl-batch jobs get ID --json | jq .request_counts\n",
    "cancel": "example:\n  sgl-batch jobs cancel ID      finished lines are kept; `jobs continue ID` runs the others\n",
    "download": """\
examples:
  sgl-batch jobs download ID -o out.jsonl --errors      failed lines: out.errors.jsonl
  sgl-batch jobs download ID -o - | jq .custom_id
  sgl-batch jobs download ID --partial -o head.jsonl    of a running job: its lines before the first unfinished one
""",
    "watch": "example:\n  sgl-batch jobs watch ID && sgl-batch jobs download ID -o out.jsonl\n",
    "continue": """\
The new job has the same input and seed. It reuses the answers of the earlier job and runs only the other lines, so its
output is complete. Only servers of sgl_batch can do this.

example:
  sgl-batch jobs continue ID --watch -o out.jsonl
""",
}
_HELP = {
    "submit": "upload a file of requests and make a job of it",
    "list": "list the server's jobs, newest first",
    "get": "show one job",
    "cancel": "cancel a job",
    "download": "fetch a job's output",
    "watch": "follow a job to its end",
    "continue": "run the lines that an ended job has not answered",
}
_ID = re.compile(r"[A-Za-z0-9_-]{1,200}", re.ASCII)


def parse_jobs_options(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Exits for --help and bad usage; raises ConfigError for bad values."""
    args = _build_parser().parse_args(list(argv))
    args.base_url = args.base_url or os.environ.get("OPENAI_BASE_URL") or DEFAULT_BASE_URL
    args.api_key = args.api_key or os.environ.get("OPENAI_API_KEY")
    if not args.base_url.startswith(("http://", "https://")):
        raise ConfigError(f"the base URL {args.base_url} is not a web address; give one like {DEFAULT_BASE_URL}")
    if not urlsplit(args.base_url).path.strip("/"):
        args.base_url = args.base_url.rstrip("/") + "/v1"  # what is left out most often
    if "id" in args and not _ID.fullmatch(args.id):
        raise ConfigError(f"{args.id!r} is not the id of a job; `sgl-batch jobs list` shows the ids")
    if "price_per_hour" in args:
        args.price_per_hour = parse_price(args.price_per_hour)
    if "metadata" in args:
        args.metadata = _metadata(args.metadata, args.priority)
    if args.command == "list" and args.limit < 1:
        raise ConfigError(f"--limit is {args.limit}; it must be at least 1")
    if args.command in ("submit", "continue") and args.output == STDOUT:
        raise ConfigError("-o cannot be - here: standard output gets the job's id; name a file")
    if args.command == "submit":
        if args.file != STDIN:
            _check_readable(Path(args.file))
        check_rows(row_rules(args, ""), args.file)
    return args


def errors_path(output: Path) -> Path:
    """Return the path for failed lines: beside the output, named as `sgl-batch run` does."""
    return output.with_name(f"{output.stem}.errors.jsonl")


def check_target(path: Path, *, overwrite: bool) -> None:
    """Raise ConfigError for a file that cannot be written, or that exists and may not be replaced."""
    if not path.parent.is_dir():
        raise ConfigError(f"the directory of {path} does not exist; make {path.parent} first")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written: no permission for {path.parent}")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} exists and is not a regular file; name another")
    if path.exists() and not overwrite:
        raise ConfigError(f"{path} exists already; name another, or give --overwrite to replace it")


def _check_readable(path: Path) -> None:
    if not path.exists():
        raise ConfigError(f"the input {path} does not exist")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"the input {path} cannot be read: permission denied")


def _metadata(pairs: Sequence[str], priority: int | None) -> dict[str, str] | None:
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"--metadata is {pair!r}; give KEY=VALUE")
        found[key] = value
    if priority is not None:
        found["priority"] = str(priority)
    return found or None


def _build_parser() -> argparse.ArgumentParser:
    parser = UsageParser(
        prog="sgl-batch jobs",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for name, text in _HELP.items():
        command = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=_EXAMPLES[name],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        _add_flags(name, command)
        server = command.add_argument_group("server")
        server.add_argument(
            "--base-url",
            metavar="URL",
            help=f"the server's address (default: OPENAI_BASE_URL, else {DEFAULT_BASE_URL})",
        )
        server.add_argument("--api-key", metavar="KEY", help="the server's API key (default: OPENAI_API_KEY)")
    return parser


def _add_flags(name: str, parser: argparse.ArgumentParser) -> None:
    def add(*flags: str, text: str, **details: Any) -> None:
        parser.add_argument(*flags, help=text, **details)

    if name == "submit":
        add("file", metavar="FILE", text="request lines (JSONL), or a table; - is standard input")
        add("--endpoint", metavar="URL", text="endpoint of all lines, as /v1/completions (default: the first line's)")
    elif name != "list":
        add("id", metavar="ID", text="the job's id")
    if name in ("submit", "continue"):
        window = "24h" if name == "submit" else None
        text = "time until the job expires, in minutes, hours or days: 30m, 24h, 7d"
        add("--window", default=window, metavar="TIME", text=f"{text} (default: {window or 'that of the earlier job'})")
        add(
            "--metadata",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            text="stored with the job; `list` shows name=NAME; may be repeated",
        )
        add(
            "--priority",
            type=int,
            metavar="N",
            text="the job's share of the engine: a number from 1 to 100 (default: 1)",
        )
        add(
            "--idempotency-key",
            metavar="KEY",
            text="a repeated request with the same key makes no second job (default: none)",
        )
        add("--wait", action="store_true", text="wait for the job's end")
        add("--watch", action="store_true", text="wait, and show the progress")
        add(
            "-o",
            "--output",
            metavar="PATH",
            text="wait, and download the output; failed lines go to PATH's stem + .errors.jsonl",
        )
    if name == "submit":
        add_table_flags(parser)
        add(
            "--model",
            metavar="NAME",
            text="model of a table's rows that name none (default: the one that the server serves)",
        )
    if name == "download":
        text = "file for the output; - is standard output, NAME.parquet makes a table (default: ID.jsonl)"
        add("-o", "--output", metavar="PATH", text=text)
        add("--errors", action="store_true", text="also download the failed lines, to PATH's stem + .errors.jsonl")
        add(
            "--partial",
            action="store_true",
            text="of a running job, download its lines before the first unfinished one",
        )
    if name in ("submit", "continue", "download"):
        add("--overwrite", action="store_true", text="replace files that exist")
    if name == "list":
        add("--limit", type=int, default=20, metavar="N", text="list so many jobs (default: %(default)s)")
        add("--all", action="store_true", text="list all jobs")
    if name not in ("cancel", "download"):
        add_price_flag(parser, "costs are shown at this price, not at the server's")
    if name != "download":
        text = "print the job as JSON" if name != "list" else "print each job as a line of JSON"
        add("--json", action="store_true", text=text)
