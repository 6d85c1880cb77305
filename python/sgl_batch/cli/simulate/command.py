"""Runs `sgl-batch simulate`: reads what is asked, simulates each policy, and prints them beside each other."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from sgl_batch.cli.plan.picture import check_picture
from sgl_batch.cli.simulate.options import simulate_parser
from sgl_batch.cli.simulate.plot import write_plot
from sgl_batch.cli.simulate.report import Compared, calibration_message, policies_message, subject_message
from sgl_batch.cli.simulate.subject import Subject, read_cells, read_subject
from sgl_batch.cli.simulate.text import text
from sgl_batch.errors import ConfigError
from sgl_batch.planner.deadline import parse_time
from sgl_batch.simulator.best import best_of
from sgl_batch.simulator.calibration import Calibrated, calibrated, with_calibration
from sgl_batch.simulator.intervals import interval_of
from sgl_batch.simulator.policies import Policy, policies_named

FORMAT = "sgl_batch.simulate/1"
_PLOT = "--plot"


def simulate_command(argv: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    args = simulate_parser().parse_args(argv)
    try:
        message = simulated(args)
    except ConfigError as error:
        sys.stderr.write(f"sgl-batch simulate: error: {error}\n")
        return 1
    sys.stdout.write(json.dumps(message, indent=2) + "\n" if args.json else text(message))
    return 0 if any("seconds" in one for one in message["policies"]) else 1


def simulated(args: argparse.Namespace) -> dict[str, Any]:
    """Return the simulation for programs. Raises ConfigError for what the user can mend."""
    if args.plot is not None:
        check_picture(args.plot, _PLOT)
    policies, subject = policies_named(args.policies), read_subject(args)
    until = math.inf if args.until is None else parse_time("--until", args.until)
    found = [] if args.calibrate is None else calibrated(read_cells(args.calibrate))
    compared = [_compared(policy, subject, found, args, until) for policy in policies]
    message: dict[str, Any] = {"format": FORMAT, **subject_message(subject)}
    if math.isfinite(until):
        message["until_s"] = until
    if args.calibrate is not None:
        message["calibration"] = calibration_message(found)
    message["policies"] = policies_message(compared)
    if args.plot is not None:
        write_plot(args.plot, [one for one in message["policies"] if "seconds" in one], title=_title(subject))
        message["plot"] = str(args.plot)
    return message


def _compared(
    policy: Policy, subject: Subject, found: Sequence[Calibrated], args: argparse.Namespace, until: float
) -> Compared:
    policy = with_calibration(policy, subject.cluster.sheet.name, found)
    try:
        best = best_of(
            policy,
            subject.model,
            subject.cluster,
            subject.requests,
            collapse=args.collapse,
            until=until,
        )
    except ConfigError as error:
        return Compared(policy=policy, why=str(error))
    # A run that is stopped takes its time whatever is assumed.
    wanted = not args.no_intervals and math.isinf(until)
    return Compared(policy=policy, best=best, interval=interval_of(best, subject.requests) if wanted else None)


def _title(subject: Subject) -> str:
    return f"{subject.model.title} on {subject.cluster.name}, {len(subject.requests):,} requests (modelled)"
