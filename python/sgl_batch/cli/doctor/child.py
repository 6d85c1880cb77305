"""The doctor's child process: runs the checks that its arguments name, and prints the rows of each as one line."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from sgl_batch.cli.doctor.machine import Machine
from sgl_batch.cli.doctor.rows import Check, Row

logger = logging.getLogger(__name__)


def rows_of(check: Check, machine: Machine) -> Sequence[Row]:
    """Return the rows of a check. A check that raises gives one row with the error."""
    try:
        return check.rows(machine)
    except Exception as error:
        logger.debug("%s failed", check.name, exc_info=True)
        lines = str(error).strip().splitlines()
        return [check.failed(f"{type(error).__name__}: {lines[0] if lines else 'no message'}")]


def answer(checks: Mapping[str, Check], argv: Sequence[str], machine: Machine | None = None) -> None:
    """Run the named checks, and write a line for each to the standard output of the call.

    What libraries print goes to standard error.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("names", nargs="+", choices=checks)
    args = parser.parse_args(argv)
    machine = machine or Machine(model=args.model)
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        for name in args.names:
            json.dump([asdict(row) for row in rows_of(checks[name], machine)], answers)
            answers.write("\n")
            answers.flush()


if __name__ == "__main__":
    from sgl_batch.cli.doctor.checks import CHECKS

    answer({check.name: check for check in CHECKS}, sys.argv[1:])
    # Python's own end frees millions of objects one by one, which takes long.
    os._exit(0)
