"""Owns the command line of `sgl-batch simulate`: its flags and its help."""

from __future__ import annotations

import argparse
from pathlib import Path

from sgl_batch import config_flags
from sgl_batch.byte_sizes import HOW_TO_WRITE
from sgl_batch.cli.run.options import UsageParser
from sgl_batch.planner.workload import DEFAULT, parse_workload
from sgl_batch.simulator.policies import POLICIES, SEVERAL

DEFAULT_WORKLOAD, DEFAULT_NUM = "8192:2048", 6000
DEFAULT_POLICIES = "batchgen,sglang,vllm"
# The flags of a run with which this machine is simulated.
HERE_FLAGS = ("device_memory", "kv_store_bytes", "kv_store_mode", "cpu_weight_dtype")
_NUM_HERE = parse_workload(DEFAULT).count
_DESCRIPTION = """\
Predict how long a batch takes on GPUs that are not here, by this engine and by the policies of others; or on this
machine, by its kept profile.

  sgl-batch simulate --model deepseek-r1 --hardware h20x16
      6,000 requests of 8,192 prompt and 2,048 output tokens: the best way to run them by BatchGen, SGLang and vLLM,
      how long each takes, what it waits for, and how sure that is
  sgl-batch simulate --model kimi-k2 --hardware h200x8 --workload 2048:8192 --num 6000 --lengths cv=0.3
      requests whose lengths differ: a standard deviation of 0.3 of their means
  sgl-batch simulate --model deepseek-r1 --hardware h20x64 --lengths lengths.txt --plot run.svg
      lengths from a file with a line "PROMPT OUTPUT" for each request, and a picture of how busy the GPUs are
  sgl-batch simulate --model deepseek-r1 --hardware h20x128 --policies batchgen:64,sglang:16,disaggregated:16
      two instances of 64 GPUs, groups of 16, and units of 16 that prefill or decode alone, at every ratio
  sgl-batch simulate --model mixtral-8x7b --hardware a5000x1 --policies batchgen,offload --workload 512:256
      on little memory, beside engines that stream weights
  sgl-batch simulate --model deepseek-r1 --hardware h20x16 --calibrate cells.csv
      with the fixed time of a pass from runs that you have measured
  sgl-batch simulate --model ./my-moe --hardware here --workload 128:64 --num 500 --lengths cv=0.3
      on this machine, with the plan of `sgl-batch plan`; `sgl-batch plan --model ./my-moe --profile` keeps a profile

The decisions are those of the engines; the seconds of a pass are a model's: data sheets, times the shares of their
rates that kernels reach, and fixed costs. No run on the GPUs that are named was compared with it. The interval behind a
time says how far it moves where what is assumed is otherwise; compare policies by their ratio, in which much of that
cancels.
"""
_EPILOG = """\
policies:
{policies}

cells of --calibrate (a CSV file with these columns; engine: a policy's name; seconds: of the whole batch):
  hardware,model,engine,workload,seconds
  h20x16,deepseek-r1,sglang,8192:2048x6000,SECONDS

exit codes:
  0  at least one policy runs the batch
  1  none does, or bad usage
"""


def simulate_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = UsageParser(
        prog="sgl-batch simulate",
        description=_DESCRIPTION,
        epilog=_EPILOG.format(policies=_policies()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", required=True, metavar="NAME", help="a known model (deepseek-r1), or a directory with config.json"
    )
    parser.add_argument(
        "--hardware",
        required=True,
        metavar="GPUxN",
        help="so many GPUs of one kind, in nodes: h20x16, h200x8, a5000x1; here: this machine, by its kept profile",
    )
    parser.add_argument(
        "--host-memory", metavar="SIZE", help=f"of each node, instead of what is assumed; {HOW_TO_WRITE}"
    )
    batch = parser.add_argument_group("the batch")
    batch.add_argument(
        "--workload",
        metavar="PROMPT:OUTPUT",
        help=f"tokens of prompts and outputs; several behind commas (default: {DEFAULT_WORKLOAD}; here "
        f"{DEFAULT.partition('x')[0]})",
    )
    batch.add_argument(
        "--num",
        type=int,
        metavar="N",
        help=f"how many requests, of the same mix (default: {DEFAULT_NUM:,}; here {_NUM_HERE})",
    )
    batch.add_argument(
        "--lengths",
        metavar="cv=SHARE|FILE",
        help='spread lengths about their means (cv=0.3), or take them from a file: a line "PROMPT OUTPUT" for each '
        "request",
    )
    parser.add_argument(
        "--policies",
        metavar="NAMES",
        help=f"what to compare, behind commas (default: {DEFAULT_POLICIES}; here batchgen alone); "
        "ratios are to the first. NAME:N: with instances, or units, of N GPUs",
    )
    parser.add_argument("--until", metavar="TIME", help="stop then, and say how many sequences have ended: 30m or 1h")
    parser.add_argument(
        "--calibrate", type=Path, metavar="CELLS.csv", help="take the fixed time of a pass from measured runs"
    )
    parser.add_argument(
        "--collapse", action="store_true", help="simulate one rank for all of an instance: quicker, and blind to waits"
    )
    parser.add_argument("--no-intervals", action="store_true", help="leave out how sure times are; quicker")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw how busy ranks are: FILE.svg or FILE.png")
    parser.add_argument("--json", action="store_true", help="print it for a program")
    here = parser.add_argument_group(
        "this machine (--hardware here)", f"as for `sgl-batch run`; sizes are {HOW_TO_WRITE}"
    )
    here.add_argument("--ranks", type=int, metavar="N", help="that share it (default: 1)")
    config_flags.add_some_flags(here, HERE_FLAGS, briefly=True)
    return parser


def _policies() -> str:
    width = max(len(policy.name) for policy in POLICIES)
    lines = [f"  {policy.name:<{width}}  {policy.says}" for policy in POLICIES]
    return "\n".join([*lines, *(f"  {name:<{width}}  {', '.join(names)}" for name, names in SEVERAL.items())])
