"""Runs `sgl-batch doctor`: all checks, their table, and an exit code. What is checked is decided in `checks`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from sgl_batch.cli.doctor.rows import Row, as_json, can_run, table
from sgl_batch.cli.run.options import UsageParser

_DESCRIPTION = """\
Look at this machine and say what an engine finds here: devices and driver, packages and whether they import, our CPU
kernels, attention backends, rates of memory and disk, limits. It takes some seconds and changes nothing.

  sgl-batch doctor
  sgl-batch doctor --model ./my-moe       # also whether the model can be loaded, and what was measured for it
  sgl-batch doctor --json doctor.json     # for a bug report, or a program
"""
_EPILOG = """\
states:
  ok       there, and as it should be
  warning  an engine runs, slower or with less than it could
  missing  not installed, or not there; the table says what lacks without it
  failed   there, and does not work (or gave no answer in time)

exit codes:
  0  an engine can run here
  1  something without which no engine runs is missing or has failed; or bad usage
"""


def _all_checks(model: Path | None) -> Iterable[Row]:
    from sgl_batch.cli.doctor.checks import CHECKS
    from sgl_batch.cli.doctor.running import directory_argument, run_checks

    return run_checks(CHECKS, directory_argument(model))


def doctor_command(argv: Sequence[str], rows_of: Callable[[Path | None], Iterable[Row]] = _all_checks) -> int:
    """Run the command; returns its exit code."""
    parser = UsageParser(
        prog="sgl-batch doctor",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="a model's directory, to be looked at too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows, with all numbers, to this file too")
    args = parser.parse_args(argv)
    begun = time.perf_counter()
    rows = list(rows_of(args.model))
    took_s = time.perf_counter() - begun
    sys.stdout.write(table(rows))
    good = can_run(rows)
    wrong = ", ".join(row.check for row in rows if row.prevents_run)
    sys.stdout.write(
        f"\nAn engine can run here ({took_s:.1f} s).\n" if good else f"\nNo engine can run here: {wrong}.\n"
    )
    if args.json is not None:
        try:
            args.json.write_text(json.dumps(as_json(rows, took_s), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            sys.stderr.write(f"sgl-batch doctor: error: {args.json} cannot be written: {error}; name another --json\n")
            return 1
    return 0 if good else 1
