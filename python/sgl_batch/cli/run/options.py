"""Owns the command line of `sgl-batch run`: its flags, their checks, and which arguments go to the engine.

It imports nothing slow, so that help and mistakes are shown at once.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from sgl_batch.api.instance_flags import InstanceOptions, add_instance_flags, instance_options
from sgl_batch.byte_sizes import HOW_TO_WRITE, parse_bytes
from sgl_batch.errors import ConfigError
from sgl_batch.file_run.file_run import DEFAULT_MAX_IN_FLIGHT
from sgl_batch.file_run.plan_refiner import DEFAULT_AFTER_MINUTES, DEFAULT_LEAST_LEFT
from sgl_batch.file_run.table_output import TableOutput
from sgl_batch.jobs.cost import add_price_flag, parse_price
from sgl_batch.jobs.progress_display import MODES
from sgl_batch.jobs.request_line import DEFAULT_MAX_LINE_BYTES
from sgl_batch.jobs.seeds import MAX_JOB_SEED
from sgl_batch.jobs.tables.results import is_table_name
from sgl_batch.jobs.tables.row_lines import RowRules, parse_body_fields
from sgl_batch.jobs.tables.sources import check_table, is_table, need_pyarrow

STDIN = "-"
_DESCRIPTION = """\
Run a file of OpenAI batch requests through a model, without a server.

INPUT has one JSON object a line, for /v1/chat/completions or /v1/completions:

  {"custom_id": "q1", "method": "POST", "url": "/v1/chat/completions",
   "body": {"model": "MODEL", "messages": [{"role": "user", "content": "2+3?"}], "max_tokens": 64}}

(on one line). OUTPUT gets one line for each answered request, in the order of INPUT, and can be read during the run. A
request that fails gets a line in the error file, and never stops the others. A manifest beside OUTPUT has what is
needed to repeat the run. "model" in a line is PATH, or the --served-model-name.

INPUT may also be a table: Parquet, an Arrow file, or a folder of Hugging Face datasets (save_to_disk, or *.parquet).
Each row is a request (see "tables" below). An OUTPUT that ends in .parquet is written as a table.
"""
_EPILOG = """\
example:
  sgl-batch run -i questions.jsonl -o answers.jsonl --model ./my-moe --served-model-name my-moe
  makes answers.jsonl, answers.manifest.json and, if a line failed, answers.errors.jsonl

exit codes:
  0    every line has its answer
  1    bad usage or input; nothing has run
  2    finished; some lines failed and are in the error file
  3    crash; finished lines are written
  130  stopped by Ctrl-C (or SIGTERM, SIGHUP); finished lines are written. A second Ctrl-C quits at once
"""
TABLES_HELP = """\
A table needs one of these columns: body (JSON text, or a struct), messages (a list of role and content, for chat),
prompt (a text, for completions), or the column that a flag names. The columns custom_id, method and url are optional.
Nulls in structs count as absent. A wrong row gets its own error, like a wrong line.

An OUTPUT that ends in .parquet has one row for each row (or line) of INPUT, in the same order, failed ones included.
Its columns are row, custom_id, status_code, request_id, content, finish_reason, prompt_tokens, completion_tokens,
error_code, error_message, and body, which is the whole answer as JSON. It is written when all rows are done; until then
the result lines are in OUTPUT.jsonl and OUTPUT.errors.jsonl. Tables need pyarrow (the extra `tables`).
"""
_ENGINE_FLAGS = (
    ("--dtype", "TYPE", "number type of weights and activations: auto, bfloat16, float32, ..."),
    ("--served-model-name", "NAME", 'the name that lines give as "model" (default: PATH)'),
    ("--context-length", "TOKENS", "longest sequence, prompt and output together (default: the model's)"),
    ("--max-total-tokens", "TOKENS", "size of the KV pool"),
    ("--page-size", "TOKENS", "tokens in one page of KV"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The parsed command line. `engine_argv` has the flags that the engine's own parser checks."""

    input: str
    output: Path
    errors: Path
    manifest: Path
    spool_dir: Path
    model: str
    seed: int
    max_in_flight: int
    max_line_bytes: int
    limit: int | None
    refine_after: float
    refine_least_left: int
    progress: str
    price_per_hour: float | None
    overwrite: bool
    resume: bool
    retry_failed: bool
    force: bool
    instances: InstanceOptions | None
    engine_argv: tuple[str, ...]
    rows: RowRules
    table: TableOutput | None  # made from `output` and `errors` at the end


class UsageParser(argparse.ArgumentParser):
    """An ArgumentParser that exits with 1 for bad usage: here 2 means failed lines."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the mistake."""
        self.print_usage()
        self.exit(1, f"{self.prog}: error: {message}\n")


def parse_run_options(argv: Sequence[str]) -> RunOptions:
    """Parse the command line. Exits for --help and bad usage; raises ConfigError for bad values."""
    args, rest = _build_parser().parse_known_args(argv)
    if isinstance(args.max_line_bytes, str):
        args.max_line_bytes = parse_bytes("--max-line-bytes", args.max_line_bytes)
    _check_range("--seed", args.seed, 0, MAX_JOB_SEED)
    if not 0 <= args.refine_after < float("inf"):
        raise ConfigError(
            f"--refine-after is {args.refine_after}; it takes minutes, or 0 to keep the plan of the start"
        )
    for flag in ("max_in_flight", "max_line_bytes", "limit", "refine_least_left"):
        _check_range("--" + flag.replace("_", "-"), getattr(args, flag), 1, None)
    if args.resume and args.overwrite:
        raise ConfigError("--resume continues OUTPUT and --overwrite replaces it; give one of them")
    if (args.retry_failed or args.force) and not args.resume:
        raise ConfigError("--retry-failed and --force need --resume; give it too")
    output = Path(args.output)
    if not output.name:
        raise ConfigError(f"the output {args.output!r} names no file; give one, as in -o out.jsonl")
    table = TableOutput(table=output) if is_table_name(output) else None
    if table is not None and args.errors:
        raise ConfigError(f"--errors is {args.errors}, but failed lines are rows of the table {output}; leave it out")
    errors = Path(args.errors) if args.errors else output.with_name(f"{output.stem}.errors.jsonl")
    return RunOptions(
        input=args.input,
        output=output if table is None else table.output,
        errors=errors if table is None else table.errors,
        manifest=output.with_name(f"{output.stem}.manifest.json"),
        spool_dir=Path(args.spool_dir) if args.spool_dir else output.parent,
        model=args.model,
        seed=args.seed,
        max_in_flight=args.max_in_flight,
        max_line_bytes=args.max_line_bytes,
        limit=args.limit,
        refine_after=args.refine_after,
        refine_least_left=args.refine_least_left,
        progress=args.progress,
        price_per_hour=parse_price(args.price_per_hour),
        overwrite=args.overwrite,
        resume=args.resume,
        retry_failed=args.retry_failed,
        force=args.force,
        instances=instance_options(args),
        engine_argv=_engine_argv(args, rest),
        rows=row_rules(args, args.served_model_name or args.model),
        table=table,
    )


def run_flags() -> tuple[str, ...]:
    """Return every flag that this command itself reads."""
    return tuple(_build_parser()._option_string_actions)


def row_rules(args: argparse.Namespace, model: str) -> RowRules:
    """Return the rules for tables that the flags give. Raises ConfigError."""
    if args.chat_column and args.prompt_column:
        raise ConfigError("--chat-column and --prompt-column name the column that makes the request; give one of them")
    return RowRules(
        model=model,
        chat_column=args.chat_column,
        prompt_column=args.prompt_column,
        id_column=args.id_column,
        body=parse_body_fields(args.body) if args.body else {},
    )


def check_rows(rows: RowRules, name: str) -> None:
    """Raise ConfigError for an input that is a table and cannot be read, or that is none and has flags for rows."""
    if name != STDIN and is_table(Path(name)):
        check_table(Path(name))
        return
    flags = {"--chat-column": rows.chat_column, "--prompt-column": rows.prompt_column, "--id-column": rows.id_column}
    for flag, value in {**flags, "--body": rows.body}.items():
        if value:
            raise ConfigError(
                f"{flag} makes requests of the rows of a table, and {name} is none, by its content; its lines are "
                f"whole requests: leave {flag} out"
            )


def check_paths(options: RunOptions) -> None:
    """Raise ConfigError for files that are missing, exist already or cannot be written, before the slow part."""
    source = Path(options.input)
    if options.input != STDIN and not source.exists():
        raise ConfigError(f"the input {source} does not exist")
    if options.input != STDIN and not os.access(source, os.R_OK):
        raise ConfigError(f"the input {source} cannot be read: permission denied")
    if str(options.output) == "-":
        raise ConfigError("the output cannot be - (standard output): a manifest is written beside it; name a file")
    check_rows(options.rows, options.input)
    if options.table is not None:
        need_pyarrow(f"writing the table {options.table.table}")
    _check_targets(options, source)
    looks_like_path = options.model.startswith(("/", "./", "../", "~")) or options.model.count("/") > 1
    if looks_like_path and not Path(options.model).exists():
        raise ConfigError(f"the model {options.model} does not exist")


def _check_targets(options: RunOptions, source: Path) -> None:
    targets = {"output": options.output, "error file": options.errors, "manifest": options.manifest}
    if options.table is not None:
        targets |= {"table": options.table.table}
    taken = {source.resolve(): "input"} if options.input != STDIN else {}
    for name, path in targets.items():
        other = taken.setdefault(path.resolve(), name)
        if other != name:
            raise ConfigError(f"the {name} {path} is also the {other}; name different files")
        if not path.parent.is_dir():
            raise ConfigError(f"the directory of the {name} {path} does not exist; make {path.parent} first")
        if not os.access(path.parent, os.W_OK):
            raise ConfigError(f"the {name} {path} cannot be written: no permission for {path.parent}")
        if path.exists() and not path.is_file():
            raise ConfigError(f"the {name} {path} exists and is not a regular file; name another")
        if path.exists() and not (options.overwrite or options.resume):
            raise ConfigError(
                f"the {name} {path} exists already; name another -o, or give --overwrite to replace it, or --resume to "
                "continue it"
            )
    if not options.spool_dir.is_dir() or not os.access(options.spool_dir, os.W_OK):
        raise ConfigError(f"--spool-dir {options.spool_dir} is not a directory that can be written; name another")


def _build_parser() -> argparse.ArgumentParser:
    parser = UsageParser(
        prog="sgl-batch run",
        usage="sgl-batch run -i INPUT -o OUTPUT --model PATH [options] [any other flag of the engine]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
        conflict_handler="resolve",
    )
    _add_run_flags(parser)
    add_instance_flags(parser.add_argument_group("instances", "several engines for one file, on Ray"))
    add_table_flags(parser)
    parser.add_argument("-h", "--help", action=_Help, nargs=0, help="show this help and exit")
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, help="show this help and all flags of SGLang, and exit")
    engine = parser.add_argument_group("engine", "all other flags of SGLang are passed to it too")
    engine.add_argument(
        "--model", "--model-path", required=True, metavar="PATH", help="model directory, or name on the hub"
    )
    for flag, metavar, text in _ENGINE_FLAGS:
        engine.add_argument(flag, metavar=metavar, help=text)
    return parser


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    def add(*flags: str, text: str, **details: Any) -> None:
        parser.add_argument(*flags, help=text, **details)

    def add_count(flag: str, default: int | None, text: str) -> None:
        parser.add_argument(flag, type=int, default=default, metavar="N", help=text)

    add("-i", "--input", required=True, metavar="INPUT", text="request lines (JSONL), or a table; - is standard input")
    add("-o", "--output", required=True, metavar="OUTPUT", text="file for the answers; NAME.parquet makes a table")
    add("--errors", metavar="PATH", text="file for failed lines (default: OUTPUT's stem + .errors.jsonl)")
    add("--overwrite", action="store_true", text="replace an existing OUTPUT, error file and manifest")
    text = "continue the OUTPUT of a run that was killed, was stopped or failed: run only the missing lines"
    add("--resume", action="store_true", text=text)
    add("--retry-failed", action="store_true", text="with --resume: run the failed lines of the earlier run again")
    add("--force", action="store_true", text="with --resume: continue although the model or the seed has changed")
    add_count("--limit", None, "run only the first N lines")
    add_count("--seed", 0, "seed of the job; lines without a seed get one derived from it (default: %(default)s)")
    add("--progress", choices=MODES, default="auto", text="auto: a bar on a terminal, else plain lines")
    add_price_flag(parser, "progress, summary and manifest then show the cost")
    add_count(
        "--max-in-flight", DEFAULT_MAX_IN_FLIGHT, "the most lines that the engine has at a time (default: %(default)s)"
    )
    text = (
        "refine the plan from measured steps when decode has run so long, then after twice as long, and so on; 0: never"
    )
    add(
        "--refine-after",
        type=float,
        default=DEFAULT_AFTER_MINUTES,
        metavar="MINUTES",
        text=f"{text} (default: %(default)g; needs a kept profile, see `sgl-batch plan --profile`)",
    )
    text = "refine the plan only while so many lines have no answer (default: %(default)s)"
    add_count("--refine-least-left", DEFAULT_LEAST_LEFT, text)
    text = f"the longest line; a longer one fails; {HOW_TO_WRITE} (default: %(default)s)"
    add("--max-line-bytes", default=DEFAULT_MAX_LINE_BYTES, metavar="BYTES", text=text)
    add("--spool-dir", metavar="DIR", text="directory for temporary files of the run (default: the one of OUTPUT)")


def add_table_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how a row becomes a request."""
    group = parser.add_argument_group("tables", TABLES_HELP)
    group.add_argument("--chat-column", metavar="NAME", help="column of user messages (texts), or of lists of messages")
    group.add_argument("--prompt-column", metavar="NAME", help="column of texts to complete")
    group.add_argument(
        "--id-column", metavar="NAME", help="column of custom_ids (default: custom_id, else row-0, row-1, ...)"
    )
    text = 'fields for each row that lacks them, as \'{"max_tokens": 64, "temperature": 0}\''
    group.add_argument("--body", metavar="JSON", help=text)


class _Help(argparse.Action):
    """Prints our flags, with those that config.py generates."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from sgl_batch.config_flags import add_cli_flags

        add_cli_flags(parser)
        parser.print_help()
        parser.exit(0)


class _HelpAll(argparse.Action):
    """Prints our flags and SGLang's. Importing SGLang takes seconds."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from sgl_batch.engine.engine_arguments import add_engine_flags

        parser.print_help()
        engine = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False, conflict_handler="resolve")
        add_engine_flags(engine)
        parser.exit(0, f"\nflags of the engine:\n{engine.format_help()}")


def _engine_argv(args: argparse.Namespace, rest: Sequence[str]) -> tuple[str, ...]:
    forwarded = ["--model-path", args.model]
    for flag, _, _ in _ENGINE_FLAGS:
        value = getattr(args, flag[2:].replace("-", "_"))
        if value is not None:
            forwarded += [flag, value]
    # SGLang's log of every step would hide the progress.
    if not any(one == "--log-level" or one.startswith("--log-level=") for one in rest):
        forwarded += ["--log-level", "error"]
    return (*forwarded, *rest)


def _check_range(flag: str, value: int | None, low: int, high: int | None) -> None:
    if value is not None and (value < low or (high is not None and value > high)):
        upper = "" if high is None else f" and at most {high}"
        raise ConfigError(f"{flag} is {value}; it must be at least {low}{upper}")
