"""Runs `sgl-batch doctor`: all checks, their table, and an exit code. The checks are listed in `checks`."""

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
Check this machine, and print what an engine finds here: devices and driver, packages and whether they import, CPU
kernels, attention backends, the speed of memory and disk, limits. It takes some seconds and changes nothing.

  sgl-batch doctor
  sgl-batch doctor --model ./my-moe       # also check whether the model can be loaded, and what was measured for it
  sgl-batch doctor --json doctor.json     # also write the results to a file, for a bug report or a program
"""
_EPILOG = """\
states:
  ok       present, and works
  warning  an engine runs, but slower or with less than possible
  missing  not installed or not present; the table says what does not work without it
  failed   present, but does not work, or gave no answer in time

exit codes:
  0  an engine can run here
  1  something that every engine needs is missing or has failed; or bad usage
"""


def _all_checks(model: Path | None) -> Iterable[Row]:
    from sgl_batch.cli.doctor.checks import CHECKS
    from sgl_batch.cli.doctor.running import directory_argument, run_checks

    return run_checks(CHECKS, directory_argument(model))


def doctor_command(argv: Sequence[str], rows_of: Callable[[Path | None], Iterable[Row]] = _all_checks) -> int:
    """Run the command. Return its exit code."""
    parser = UsageParser(
        prog="sgl-batch doctor",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="model directory, to be checked too")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the results, with all numbers, to this file"
    )
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
