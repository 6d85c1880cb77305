"""Owns the command scripts/gpu_bringup: its arguments, and the stages that it runs."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from bringup.folder_lock import FolderHeld, held
from bringup.machine import Machine
from bringup.runner import Bringup, Wanted
from bringup.stages import ROOT, Runs, Stage, all_stages

OUT = ROOT / "benchmark" / "out" / "gpu-bringup"
DESCRIPTION = """\
Bring a GPU machine up in stages, each in a process of its own with its own time limit: what is installed, kernels,
stock SGLang on tiny models, our engine in each of its forms with the tokens compared, suites, the cost of a decode
step, then the benchmarks. One call goes as far as its time allows; the next one goes on from there. None of this has
run on a GPU yet: all seconds are guesses.
"""
EPILOG = """\
What is run: stages that are not ok and have not failed. After a repair, --again takes the failed ones too; --only runs
the stages named, whatever became of them, and what they need.

Tokens are compared with stock SGLang's of the same number type on the same device, greedy, for 12 prompts of 1 to 600
tokens: equal, or equal up to a step at which our token is one of stock's five best and its logit, as stock returns it,
lies at most 0.25 below the best one's (a near tie; 0.5 with numbers of 8 bits). At least half of all tokens must come
before any near tie. The stage also fails if the engine's counters do not show that it did what the stage is for.

DIR/DEVICE-DTYPE holds table.txt (written after each stage), state.json, a log for each stage (NAME.log; its process's
command is in --list --commands), the models of random weights and the benchmarks' reports.

examples:
  scripts/gpu_bringup --list
  scripts/gpu_bringup --minutes 9                   as much as nine minutes hold; again, to go on
  scripts/gpu_bringup --only graphs --minutes 5     one stage, and what it needs
  scripts/gpu_bringup --again --minutes 9           after a repair
  scripts/gpu_bringup --dtype float16 --minutes 9   the same with another number type, in a folder of its own
  scripts/gpu_bringup --dry-run                     without a GPU: what needs none is run, all else is `not run`
  scripts/gpu_bringup --device cpu                  the same engines on a CPU, in minutes: a test of this program

With several GPUs the first is used (CUDA_VISIBLE_DEVICES names another): ranks are to share one.
Exit codes: 0 no stage has failed, 1 one has, 2 bad usage, 130 interrupted (the stage under way is run again).
"""


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_bringup",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what")
    what.add_argument("--list", action="store_true", help="print the stages in order, and run none")
    what.add_argument("--commands", action="store_true", help="with --list: the command of each stage's process, too")
    what.add_argument("--only", metavar="STAGE,...", help="these stages alone, with what they need")
    what.add_argument("--again", action="store_true", help="failed stages, too")
    where = parser.add_argument_group("where")
    where.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(cuda)")
    where.add_argument("--dry-run", action="store_true", help="run only what needs no device")
    where.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="(bfloat16)")
    where.add_argument("--attention-backend", default="triton", help="of both engines on a GPU (triton)")
    where.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="(benchmark/out/gpu-bringup)")
    much = parser.add_argument_group("how long")
    much.add_argument(
        "--minutes", type=float, help="begin nothing that may not end in this time, and end then (no end)"
    )
    much.add_argument("--benchmark-minutes", type=float, default=9.0, help="of each benchmark on a GPU (9)")
    return parser.parse_args(argv)


def fault_of(options: argparse.Namespace, stages: tuple[Stage, ...]) -> str | None:
    """Return what is wrong with the command line, and the remedy."""
    names = {stage.name for stage in stages}
    for name in only(options):
        if name not in names:
            return f"--only names {name!r}, which is no stage: see scripts/gpu_bringup --list"
    for flag in ("minutes", "benchmark_minutes"):
        value = getattr(options, flag)
        if value is not None and value <= 0:
            return f"--{flag.replace('_', '-')} is {value}; it must be more than 0"
    if options.commands and not options.list:
        return "--commands goes with --list"
    if options.device == "cuda" and not (options.dry_run or options.list or has_gpu()):
        return "there is no GPU here: use --dry-run, or --device cpu to run the engines on the CPU"
    return None


def only(options: argparse.Namespace) -> list[str]:
    """Return the names given to --only."""
    return [name for name in (options.only or "").split(",") if name]


def has_gpu() -> bool:
    """Return whether there is a GPU. torch is not used: it would take GPU memory for this process."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return any(Path("/dev").glob("nvidia[0-9]*"))
    done = subprocess.run([program, "-L"], capture_output=True, text=True, check=False)
    return done.returncode == 0 and "GPU" in done.stdout


def environment(device: str) -> dict[str, str]:
    """Return the environment of the stages' processes: one GPU or none, this repository's code, no network models."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] if device == "cuda" else ""
    path = os.pathsep.join([str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"CUDA_VISIBLE_DEVICES": gpus, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **own, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def wanted(options: argparse.Namespace) -> Wanted:
    """Return the settings of the options."""
    here, lacking = {Runs.ANYWHERE, Runs.EITHER, Runs.GPU}, ""
    if options.dry_run:
        here, lacking = {Runs.ANYWHERE}, "dry run"
    elif options.device == "cpu":
        here, lacking = {Runs.ANYWHERE, Runs.EITHER}, "needs a GPU"
    return Wanted(
        here=here,
        lacking=lacking,
        only=only(options),
        again=options.again,
        seconds=None if options.minutes is None else 60.0 * options.minutes,
    )


def show(stages: tuple[Stage, ...], *, commands: bool) -> None:
    """Return the list of stages as text."""
    width = max(len(stage.name) for stage in stages)
    for stage in stages:
        needs = f"; needs {', '.join(stage.needs)}" if stage.needs else ""
        print(f"{stage.name:{width}}  {stage.runs.value:10}  {stage.what}{needs} (at most {stage.limit_s:.0f} s)")
        if commands:
            print(f"{'':{width}}  {' '.join(map(repr, stage.argv))}")


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    options = parse(argv)
    name = "dry-run" if options.dry_run else f"{options.device}-{options.dtype}"
    folder = (options.out / name).resolve()
    machine = Machine(
        device=options.device,
        dtype=options.dtype,
        folder=folder,
        attention_backend=options.attention_backend,
        benchmark_minutes=options.benchmark_minutes,
    )
    stages = all_stages(machine)
    fault = fault_of(options, stages)
    if fault is not None:
        print(f"scripts/gpu_bringup: {fault}", file=sys.stderr)
        return 2
    if options.list:
        show(stages, commands=options.commands)
        return 0
    # End on SIGTERM as after Ctrl-C: a stage's processes are in their own group and would stay behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with held(folder):
            return bring_up(options, stages, folder)
    except FolderHeld as error:
        print(f"scripts/gpu_bringup: {error}", file=sys.stderr)
        return 2


def bring_up(options: argparse.Namespace, stages: tuple[Stage, ...], folder: Path) -> int:
    """Run the stages; return the command's exit code."""
    bringup = Bringup(
        stages,
        folder,
        wanted(options),
        environment=environment("cpu" if options.dry_run else options.device),
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    code = 130
    try:
        code = 0 if bringup.run() else 1
    except KeyboardInterrupt:
        print("scripts/gpu_bringup: interrupted; call it again to go on", file=sys.stderr)
    print(f"{bringup.table()}\n{folder / 'table.txt'}", flush=True)
    return code
