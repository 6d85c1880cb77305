"""Runs `sgl-batch plan`: finds or makes a profile, searches a plan for a workload, and prints it. It starts no run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgl_batch import config as batch_config
from sgl_batch import config_flags
from sgl_batch.cli.plan.options import RUN_FLAGS, plan_parser
from sgl_batch.cli.plan.picture import check_picture, write_picture
from sgl_batch.cli.plan.predictor import Predictor, is_here, predictor_here, predictor_on
from sgl_batch.cli.plan.profile_here import profile_here, profile_message
from sgl_batch.cli.plan.report import (
    COUNTED,
    FITTED,
    FROM_SHEET,
    MEASURED,
    deadline_message,
    hardware_message,
    instances_message,
    memory_message,
    outcome_message,
    too_large,
    workload_message,
)
from sgl_batch.cli.plan.subject import Subject, read_subject
from sgl_batch.cli.plan.text import text
from sgl_batch.config import BatchConfig
from sgl_batch.errors import ConfigError
from sgl_batch.planner.data_sheets import DATA_SHEETS, sheet_named
from sgl_batch.planner.deadline import parse_deadline, within_deadline
from sgl_batch.planner.layouts import ONE_GPU, parse_gpus
from sgl_batch.planner.search import Planned
from sgl_batch.planner.sheet_costs import Assumptions

FORMAT = "sgl_batch.plan/1"
_MOST_INSTANCES = 4096


def plan_command(argv: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    args = plan_parser().parse_args(argv)
    try:
        message = plan(args, config_flags.from_args(args))
    except ConfigError as error:
        sys.stderr.write(f"sgl-batch plan: error: {error}\n")
        return 1
    sys.stdout.write(json.dumps(message, indent=2) + "\n" if args.json else text(message))
    return 0 if message["plan"] is not None else 1


def plan(args: argparse.Namespace, config: BatchConfig) -> dict[str, Any]:
    """Return the plan for programs. Raises ConfigError for what the user can mend."""
    deadline_s = None if args.deadline is None else parse_deadline(args.deadline)
    if args.picture is not None:
        check_picture(args.picture)
    message: dict[str, Any]
    if is_here(args.hardware):
        predictor, message = _here(args, config)
    else:
        predictor, message = _on_sheet(args, config)
    if message.get("profile", {}).get("source", MEASURED) is None:
        _refuse_without_profile(args)
        message.update(_defaults(predictor))
    else:
        message.update(_predicted(predictor, args, deadline_s))
    return {**message, "run_flags": _run_flags(args, message)}


def _here(args: argparse.Namespace, config: BatchConfig) -> tuple[Predictor, dict[str, Any]]:
    if args.gpus is not None:
        names = f"--hardware {DATA_SHEETS[0].name}"
        raise ConfigError(f"--gpus is for GPUs of a data sheet; name them too, as in {names}")
    instances = _instances(args)
    subject = read_subject(args, config)
    profile, why_none = profile_here(args, subject)
    predictor = predictor_here(subject, config, profile, instances)
    message = {"profile": profile_message(profile, why_none)}
    return predictor, {**_head(args, subject), **message}


def _instances(args: argparse.Namespace) -> int:
    text = args.instances or "1"
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(_MOST_INSTANCES)) else 0
    if not 1 <= number <= _MOST_INSTANCES:
        raise ConfigError(f"--instances is {text!r}; it takes a number of engines from 1 to {_MOST_INSTANCES:,}")
    return number


def _on_sheet(args: argparse.Namespace, config: BatchConfig) -> tuple[Predictor, dict[str, Any]]:
    if args.instances is not None:
        raise ConfigError("--instances is of this machine; with --hardware the plan makes instances of the --gpus")
    sheet, gpus, assumed = sheet_named(args.hardware), parse_gpus(args.gpus or "1"), Assumptions()
    if args.profile or args.profile_file:
        raise ConfigError(
            "--profile and --profile-file are of this machine, and --hardware names another; leave one out"
        )
    subject = read_subject(args, config)
    predictor = predictor_on(sheet, gpus, subject, config, assumed)
    return predictor, {**_head(args, subject), "hardware": hardware_message(sheet, gpus, assumed)}


def _head(args: argparse.Namespace, subject: Subject) -> dict[str, Any]:
    return {"format": FORMAT, "model": args.model, "workload": workload_message(subject.workload)}


def _predicted(predictor: Predictor, args: argparse.Namespace, deadline_s: float | None) -> dict[str, Any]:
    source = FITTED if is_here(args.hardware) else FROM_SHEET
    outcome = predictor.search()
    message = outcome_message(outcome, source)
    if not outcome.ranked:
        return message if is_here(args.hardware) else {**message, "why": too_large(outcome, predictor.among)}
    best = outcome.ranked[0]
    exchange = predictor.costs_of(best.layout).exchange
    if exchange is not None:
        message["exchange"] = {"text": exchange.label, "bytes_per_s": exchange.bytes_per_s, "source": source}
    if best.layout.instances > 1:
        message["instances"] = instances_message(best, predictor.subject.workload, source)
    host = predictor.host_memory()
    if host:
        message["host_memory"] = {**host, "source": COUNTED}
    if deadline_s is not None:
        count = predictor.subject.workload.count
        found = within_deadline(lambda few: predictor.seconds(best, few), count, deadline_s)
        message["deadline"] = deadline_message(found, count, source)
    if args.picture is not None:
        _draw(predictor, best, args.picture, source)
        message["picture"] = str(args.picture)
    return message


def _draw(predictor: Predictor, best: Planned, target: Path, source: str) -> None:
    model = predictor.subject.directory.resolve().name
    write_picture(target, predictor.pictured(best), title=f"{model}: three layers of the plan ({source})")


def _refuse_without_profile(args: argparse.Namespace) -> None:
    for flag, value in (("--deadline", args.deadline), ("--picture", args.picture), ("--instances", args.instances)):
        if value is not None:
            raise ConfigError(
                f"{flag} needs a prediction, and there is no profile of this machine: make one with --profile, or name "
                "GPUs with --hardware"
            )


def _defaults(predictor: Predictor) -> dict[str, Any]:
    """Return the engine's own limits, with their memory."""
    found = predictor.memory(ONE_GPU)(predictor.default())
    if found.lacks:
        return {"plan": None, "why": f"the engine's defaults do not fit: {found.lacks}"}
    return {"plan": {"flags": []}, "memory": memory_message(found)}


def _run_flags(args: argparse.Namespace, found: dict[str, Any]) -> list[str]:
    """Return all flags that a run of the plan takes: those of the plan, and those of memory that were given here."""
    given = [f"--model {args.model}"]
    given += [] if args.dtype == "auto" else [f"--dtype {args.dtype}"]
    plan = found.get("plan") or {}
    chosen, instances = plan.get("flags", []), plan.get("layout", {}).get("instances", 1)
    given += [f"--instances {instances}"] if instances > 1 else []
    for name in RUN_FLAGS:
        flag, value = f"--{name.replace('_', '-')}", getattr(args, name)
        if value != batch_config.BatchConfig().flat()[name] and flag not in chosen:
            given.append(f"{flag} {value}")
    return [*given, *chosen]
