"""Owns the command line of `sgl-batch plan`: its flags and its help."""

from __future__ import annotations

import argparse
from pathlib import Path

from sgl_batch import config_flags
from sgl_batch.byte_sizes import HOW_TO_WRITE
from sgl_batch.cli.run.options import UsageParser
from sgl_batch.planner.data_sheets import DATA_SHEETS, HERE
from sgl_batch.planner.workload import DEFAULT

_DESCRIPTION = """\
Choose the flags of `sgl-batch run` for a model, a machine and a batch: the sizes of groups and sub-batches, where KV
lies and whether weights are streamed, for the least predicted time of the whole batch.

  sgl-batch plan --model ./my-moe --profile
      measure one layer of each kind on this machine, in about a minute, keep the profile, and plan with it
  sgl-batch plan --model ./my-moe --workload 128:32x256
      for 256 requests of 128 prompt and 32 output tokens, with the profile that was kept
  sgl-batch plan --model ./my-moe --lengths lengths.txt --kv-store-bytes 8G --json
      for the lengths in a file: a line "PROMPT OUTPUT" for each request
  sgl-batch plan --model ./my-moe --lengths lengths.txt --hardware H100-SXM --gpus 8
      for eight GPUs that are not here, from their data sheet: how many instances of how many ranks, and how long
  sgl-batch plan --model ./my-moe --lengths lengths.txt --hardware H200 --deadline 10m
      whether the batch is done in ten minutes, or how many of its requests
  sgl-batch plan --model ./my-moe --picture layers.svg
      a picture of three layers of the plan: what computes, what is copied, and what everything waits for

A profile runs the engine's own code on few layers with made-up weights, so no weight is read. Close other programs
first: they make it slower than the machine is. Without a profile the engine's defaults are named, and nothing is
predicted. With --hardware the rates are a data sheet's, and the shares of them that are reached are assumed: nothing of
it was measured, or compared with a run on a GPU. Each number says where it is from: measured here, fitted to the
profile, counted from the model's files, data sheet, or assumed.

With a profile kept, `sgl-batch run`, the server and Engine plan the sizes that are not given by themselves.
"""
_EPILOG = """\
exit codes:
  0  there is a plan (whether or not it meets the deadline)
  1  nothing fits, or bad usage
"""
# The flags of a run that a plan is made for.
RUN_FLAGS = ("device_memory", "kv_store_bytes", "kv_store_mode", "weights", "weight_memory", "cpu_weight_dtype")


def plan_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = UsageParser(
        prog="sgl-batch plan",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", "--model-path", required=True, metavar="DIR", help="a model's directory")
    parser.add_argument("--profile", action="store_true", help="measure this machine first, and keep the profile")
    parser.add_argument("--profile-file", type=Path, metavar="FILE", help="the profile (default: in the user's cache)")
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument(
        "--workload",
        metavar="PROMPT:OUTPUTxCOUNT",
        help=f"tokens of prompts and outputs, and how many requests; several behind commas (default: {DEFAULT})",
    )
    batch.add_argument("--lengths", type=Path, metavar="FILE", help='a line "PROMPT OUTPUT" in tokens for each request')
    parser.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto", help="as for `sgl-batch run`"
    )
    parser.add_argument(
        "--hardware",
        default=HERE,
        metavar="NAME",
        help=f"GPUs to predict for by their data sheet: {', '.join(sheet.name for sheet in DATA_SHEETS)}; {HERE}: this "
        "machine, by its profile (the default)",
    )
    parser.add_argument(
        "--gpus",
        metavar="N",
        help="with --hardware NAME: how many there are (default: 1); the plan makes instances of several ranks of them",
    )
    parser.add_argument(
        "--instances",
        metavar="N",
        help="plan for N engines of one batch, each with cores of its own, as many as the profile was made with",
    )
    parser.add_argument(
        "--deadline",
        metavar="TIME",
        help="say whether the batch is done in this time, or how many of its requests: 90s, 10m or 1.5h",
    )
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help="draw three layers of the plan with their critical path: FILE.svg or FILE.png",
    )
    parser.add_argument("--json", action="store_true", help="print it for a program")
    memory = parser.add_argument_group("memory", f"as for `sgl-batch run`, of one GPU; sizes are {HOW_TO_WRITE}")
    config_flags.add_some_flags(memory, RUN_FLAGS, briefly=True)
    return parser
