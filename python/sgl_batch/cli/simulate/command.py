"""Runs `sgl-batch simulate`: reads what is asked, simulates each policy, and prints them beside each other."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from sgl_batch.cli.plan.picture import check_picture
from sgl_batch.cli.simulate.options import DEFAULT_POLICIES, HERE_FLAGS, simulate_parser
from sgl_batch.cli.simulate.plot import write_plot
from sgl_batch.cli.simulate.report import Compared, calibration_message, policies_message, subject_message
from sgl_batch.cli.simulate.subject import Subject, read_cells, read_subject
from sgl_batch.cli.simulate.text import text
from sgl_batch.config import BatchConfig
from sgl_batch.errors import ConfigError
from sgl_batch.planner.data_sheets import HERE
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
    until = math.inf if args.until is None else parse_time("--until", args.until)
    found = _here(args, until) if args.hardware.lower() == HERE else _on_cluster(args, until)
    message: dict[str, Any] = {"format": FORMAT, **found}
    if math.isfinite(until):
        message["until_s"] = until
    if args.plot is not None:
        runs = [one for one in message["policies"] if "seconds" in one]
        write_plot(args.plot, runs, title=_title(message))
        message["plot"] = str(args.plot)
    return message


def _here(args: argparse.Namespace, until: float) -> dict[str, Any]:
    """Return the simulation on this machine."""
    from sgl_batch.cli.simulate.here import OURS, here_message, here_policies, read_here  # reads profiles: slow

    policies, subject = policies_named(args.policies or OURS), read_here(args)
    found = here_policies(subject, policies, until=until, intervals=not args.no_intervals)
    return {**here_message(subject), "policies": found}


def _on_cluster(args: argparse.Namespace, until: float) -> dict[str, Any]:
    """Return the simulation on GPUs that are not here."""
    for name in ("ranks", *HERE_FLAGS):
        if getattr(args, name) not in (None, BatchConfig().flat().get(name)):
            raise ConfigError(f"--{name.replace('_', '-')} is for --hardware {HERE}; leave it out")
    policies, subject = policies_named(args.policies or DEFAULT_POLICIES), read_subject(args)
    found = [] if args.calibrate is None else calibrated(read_cells(args.calibrate))
    compared = [_compared(policy, subject, found, args, until) for policy in policies]
    calibration = {} if args.calibrate is None else {"calibration": calibration_message(found)}
    return {**subject_message(subject), **calibration, "policies": policies_message(compared, until=until)}


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


def _title(message: Mapping[str, Any]) -> str:
    name = message["hardware"]["name"]
    where = "this machine" if name == HERE else name
    return f"{message['model']['title']} on {where}, {message['workload']['requests']:,} requests (modelled)"
