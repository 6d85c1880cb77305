#!/usr/bin/env python
"""Owns the command that measures engines with little memory; each sub-command has a folder."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from comparison import machine
from comparison.terminal import exit_code, say
from large_model import command as weights
from memory_pressure import command as pressure

from sgl_batch.errors import ConfigError, EngineError

ROOT = Path(__file__).resolve().parent.parent
DESCRIPTION = """\
Measure engines with less memory than they would like, each in a fresh process, alternating round by round. Loading and
a warm-up are not timed.
"""
EPILOG = """\
examples:
  python benchmark/offline.py --make-model models/qwen3moe-1b
      the random checkpoint of docs/benchmarks.md, in half a minute
  python benchmark/memory.py pressure --model models/qwen3moe-1b
      sequences with ten times the KV that the device holds
  python benchmark/offline.py --make-model models/qwen3moe-3b --make-model-layers 20 --make-model-expert-width 768
  python benchmark/memory.py weights --model models/qwen3moe-3b --limit 4G
      a model of 6 GB in 4 GiB of memory

The tables go to standard output, progress to standard error, the JSON record and a log per run to --out.
Exit codes: 0 all runs finished, 1 bad usage, 2 an engine failed, 130 interrupted; what was finished is reported.
"""


class Measurement(Protocol):
    """A sub-command with its parsed flags."""

    def run(self, say: Callable[[str], None]) -> None:
        """Run all rounds. Raises EngineError if an engine fails."""

    def report(self) -> str:
        """Return the tables of the finished rounds in Markdown."""

    def record(self) -> dict[str, Any]:
        """Return all figures of the finished rounds."""


COMMANDS = {"pressure": pressure, "weights": weights}


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        one = commands.add_parser(name, help=module.HELP, description=module.HELP)
        one.add_argument("--model", type=Path, required=True, help="checkpoint directory in Hugging Face format")
        one.add_argument("--rounds", type=int, default=3, help="(3)")
        one.add_argument("--timeout-s", type=float, default=1800.0, help="limit of one run, start included (1800)")
        one.add_argument("--out", type=Path, metavar="DIR", help="for record and logs (benchmark/out/memory-DATE-TIME)")
        module.add_flags(one)
    return parser.parse_args(argv)


def measure(options: argparse.Namespace, argv: list[str]) -> int:
    """Run the sub-command, print the tables, write the record; return the exit code."""
    if options.rounds < 1:
        raise ConfigError(f"--rounds is {options.rounds}; it must be at least 1")
    started = datetime.now().astimezone()
    out = (options.out or ROOT / "benchmark" / "out" / f"memory-{started:%Y%m%d-%H%M%S}").resolve()
    measurement: Measurement = COMMANDS[options.command].Measurement(options, out)
    out.mkdir(parents=True, exist_ok=True)
    source, code = machine.source(ROOT), 0
    say(f"logs in {out}")
    # Report on SIGTERM as after Ctrl-C: the engine's process is in its own session and would stay behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        measurement.run(say)
    except KeyboardInterrupt:
        say("interrupted; reporting the rounds that are finished")
        code = 130
    except EngineError as error:
        say(str(error))
        code = 2
    here = machine.hardware()
    changed = f" with {source['changed_files']} changed files" if source["changed_files"] else ""
    head = (
        f"{options.model.resolve().name}. {machine.describe(here)}.\n\n{started:%Y-%m-%d}, "
        f"{(source['commit'] or 'no git commit')[:12]}{changed}: `python benchmark/memory.py {shlex.join(argv)}`"
    )
    text = f"{head}\n\n{measurement.report()}"
    record = {"machine": here, "source": source, "argv": argv, **measurement.record()}
    (out / "record.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (out / "report.md").write_text(text, encoding="utf-8")
    print(text, end="")
    return code


def main(argv: list[str]) -> int:
    """Run the command. User errors end it with one line instead of a traceback."""
    options = parse(argv)
    return exit_code("memory.py", lambda: measure(options, argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
