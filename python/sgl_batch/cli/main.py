"""The `sgl-batch` command: picks the subcommand, and imports only that one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata
from typing import NoReturn

_USAGE = """\
usage: sgl-batch COMMAND [options]

Batch inference for mixture-of-experts models on SGLang's own processes.

commands:
  run     run a JSONL file of OpenAI batch requests: sgl-batch run -i in.jsonl -o out.jsonl --model PATH
  serve   serve the model over HTTP; takes the flags of python -m sgl_batch.launch_server
  jobs    send jobs to a server and fetch their results: sgl-batch jobs submit in.jsonl --watch -o out.jsonl
  instances
          list, add, drain and remove the engines of a server: sgl-batch instances list
  doctor  check this machine: devices, packages, kernels, rates, limits; print what is missing and how to fix it
  models  list the supported models and number formats
  check   check whether a model would run here, how, and in how much memory: sgl-batch check --model DIR
  plan    choose the flags of a run for a model, this machine and a batch: sgl-batch plan --model DIR --profile
  simulate
          predict a batch on GPUs that are not here, by this engine and by others: sgl-batch simulate --model
          deepseek-r1 --hardware h20x16
  trace   print the states that a sequence went through: sgl-batch trace trace.jsonl ID

`sgl-batch COMMAND --help` explains a command. `sgl-batch --version` prints the version.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit code (1 for bad usage)."""
    command, *rest = list(sys.argv[1:] if argv is None else argv) or [""]
    if command == "run":
        from sgl_batch.cli.run.command import run_command

        return run_command(rest)
    if command == "serve":
        from sgl_batch.launch_server import main as serve

        return int(serve(rest, "sgl-batch serve") or 0)
    if command == "jobs":
        from sgl_batch.cli.jobs.command import jobs_command

        return jobs_command(rest)
    if command == "instances":
        from sgl_batch.cli.instances.command import instances_command

        return instances_command(rest)
    if command == "doctor":
        from sgl_batch.cli.doctor.command import doctor_command

        return doctor_command(rest)
    if command == "models":
        from sgl_batch.cli.models.list_command import models_command

        return models_command(rest)
    if command == "check":
        from sgl_batch.cli.models.check_command import check_command

        return check_command(rest)
    if command == "plan":
        from sgl_batch.cli.plan.command import plan_command

        return plan_command(rest)
    if command == "simulate":
        from sgl_batch.cli.simulate.command import simulate_command

        return simulate_command(rest)
    if command == "trace":
        from sgl_batch.cli.trace import trace_command

        return trace_command(rest)
    if command in ("-h", "--help", "help"):
        sys.stdout.write(_USAGE)
        return 0
    if command == "--version":
        sys.stdout.write(f"sgl-batch {metadata.version('sgl-batch')}\n")
        return 0
    complaint = f"unknown command {command!r}" if command else "no command given"
    sys.stderr.write(f"{_USAGE}\nsgl-batch: error: {complaint}\n")
    return 1


def command() -> NoReturn:
    """Run the program: `main`, then the end of its process."""
    from sgl_batch.program_end import end_with

    end_with(main)
