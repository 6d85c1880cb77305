#!/usr/bin/env python
"""Owns the proof that `sgl-batch run` needs no more memory for 100,000 lines than for 1,000, with the real command.

It runs the command on test/models/tiny-qwen3-moe, first over a few lines and then over many: small distinct
requests made from the GSM8K sample, for both endpoints, greedy and sampled, some with two choices of one prompt, some
with logprobs. While lines are answered it samples the memory of every process. It fails (exit code 1) unless

- each run ends with exit code 0 and answers every line once, in the order of its input, and
- no process's peak in the long run is above its peak in the short one by more than the bound allows.

pytest does not collect this file: it takes about five minutes on two cores. `--help` shows its flags.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import psutil
from small_requests import answers_fault, write_requests
from tree_memory import Samples, sample_tree

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
# One pool for both runs. By itself the engine takes half of the memory that is free when it starts, and some of
# SGLang's buffers grow with the pool: on a shared machine two runs would differ by tens of MiB.
POOL_TOKENS = 1 << 20
STOP_S = 30.0
EXAMPLES = """\
examples:
  test/long/flat_memory.py
      1,000 lines, then 100,000: about five minutes on two cores
  test/long/flat_memory.py --many 20000 --keep /tmp/flat
      a shorter look; every sample is in /tmp/flat/many.csv, by time, lines written and process
  test/long/flat_memory.py --many 20000 -- --max-in-flight 256
      arguments after -- go to `sgl-batch run`
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """How far a peak may lie above the short run's: a share of it, and a constant."""

    share: float
    mib: float

    def limit_mib(self, peak_mib: float) -> float:
        return peak_mib * (1 + self.share) + self.mib


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run of the command."""

    num_lines: int
    wall_s: float
    answering_s: float
    samples: Samples


class RunFailedError(Exception):
    """A run of the command failed; the message names the run and the fault."""


def say(text: str) -> None:
    """Write a line to standard output at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def measure(name: str, num_lines: int, directory: Path, args: argparse.Namespace) -> Measured:
    """Run the command over `num_lines` lines and sample it. Raises RunFailedError."""
    source, output = directory / f"{name}.jsonl", directory / f"{name}.out.jsonl"
    output.unlink(missing_ok=True)  # an earlier run with --keep may have left one, which would count as this run's
    write_requests(source, num_lines, ROOT / "test" / "data" / "gsm8k_sample.jsonl")
    say(f"-- {num_lines:,} lines")
    began = time.monotonic()
    process = subprocess.Popen(run_argv(source, output, args.flags), env={**os.environ, "HF_HUB_OFFLINE": "1"})
    try:
        with (directory / f"{name}.csv").open("w", encoding="utf-8") as sample_file:
            samples, answering_s = sample_until_end(process, output, sample_file, args)
    finally:
        end(process)
    wall_s = time.monotonic() - began
    if process.returncode != 0:
        raise RunFailedError(f"the run of {num_lines:,} lines ended with exit code {process.returncode}, not 0")
    if not samples.taken:
        raise RunFailedError(f"{num_lines:,} lines were over before a sample was taken; give --few more")
    if (fault := answers_fault(output, num_lines)) is not None:
        raise RunFailedError(f"the run of {num_lines:,} lines: {fault}")
    return Measured(num_lines=num_lines, wall_s=wall_s, answering_s=answering_s, samples=samples)


def run_argv(source: Path, output: Path, flags: list[str]) -> list[str]:
    """Return the command line; `flags` come last, so that they override the others."""
    command = [str(Path(sys.executable).with_name("sgl-batch")), "run", "-i", str(source), "-o", str(output)]
    model = ("--model", str(ROOT / "test" / "models" / "tiny-qwen3-moe"), "--served-model-name", "default")
    return [*command, "--overwrite", *model, "--max-total-tokens", str(POOL_TOKENS), *flags]


def sample_until_end(
    process: subprocess.Popen[bytes], output: Path, sample_file: TextIO, args: argparse.Namespace
) -> tuple[Samples, float]:
    """Return the samples taken while lines are answered, and the seconds that this took.

    `sample_file` gets the samples of the start, too. Answering begins when the command makes the output file, with its
    engine started. The peak of a start (imports, loading) is the same for every input and would hide growth below it.
    """
    samples, began = Samples(), time.monotonic()
    started_s: float | None = None
    sample_file.write("seconds,output_bytes,role,rss_mib,uss_mib\n")
    while process.poll() is None:
        now_s = time.monotonic() - began
        if now_s > args.timeout_s:
            raise RunFailedError(f"the run did not end within {args.timeout_s:.0f} s (--timeout-s)")
        has_started = output.exists()
        found = sample_tree(process.pid)
        num_bytes = output.stat().st_size if has_started else 0
        for role, memory in found.items():
            sample_file.write(
                f"{now_s:.1f},{num_bytes},{role},{mib(memory.rss_bytes):.1f},{mib(memory.uss_bytes):.1f}\n"
            )
        if has_started:
            started_s = now_s if started_s is None else started_s
            samples.taken.append(found)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(args.sample_s)
    return samples, time.monotonic() - began - (started_s or 0.0)


def end(process: subprocess.Popen[bytes]) -> None:
    """Stop the command if it still runs: by SIGTERM, so that it saves finished lines, then kill its whole tree."""
    if process.poll() is not None:
        return
    below = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        for one in [psutil.Process(process.pid), *below]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()


def mib(num_bytes: int) -> float:
    """Return bytes as MiB."""
    return num_bytes / MIB


def report(few: Measured, many: Measured, bound: Bound) -> bool:
    """Print the table; return whether every process stayed within the bound."""
    for run in (few, many):
        rate = run.num_lines / run.answering_s
        say(
            f"{run.num_lines:>9,} lines in {run.wall_s:.0f} s, {run.answering_s:.0f} s of them answering "
            f"({rate:,.0f} lines/s), {len(run.samples.taken):,} samples"
        )
    say(f"peak MiB while answering; the bound on RSS is +{bound.share:.0%} and {bound.mib:.0f} MiB")
    short, long = f"{few.num_lines:,}", f"{many.num_lines:,}"
    headers = (f"RSS {short}", f"RSS {long}", "bound", f"USS {short}", f"USS {long}", "growth", "late growth")
    say(f"{'process':<12}" + "".join(f"{header:>13}" for header in headers))
    roles = dict.fromkeys(few.samples.roles() + many.samples.roles())
    verdicts = [report_role(role, few, many, bound) for role in roles]
    say("growth: of the RSS peak; late growth: from the first half of the long run to its second, the sign of a leak")
    return all(verdicts)


def report_role(role: str, few: Measured, many: Measured, bound: Bound) -> bool:
    """Print one process's line; return whether it stayed within the bound."""
    before, after = few.samples.peak(role), many.samples.peak(role)
    limit = bound.limit_mib(mib(before.rss_bytes))
    numbers = (mib(before.rss_bytes), mib(after.rss_bytes), limit, mib(before.uss_bytes), mib(after.uss_bytes))
    grown = (mib(after.rss_bytes - before.rss_bytes), mib(many.samples.late_growth_bytes(role)))
    is_flat = mib(after.rss_bytes) <= limit
    line = f"{role:<12}" + "".join(f"{one:>13,.1f}" for one in numbers) + "".join(f"{one:>+13,.1f}" for one in grown)
    say(line + ("" if is_flat else "   over the bound"))
    return is_flat


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; `flags` are the arguments after --."""
    own, flags = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--few", type=int, default=1_000, metavar="N", help="lines of the first run (%(default)s)")
    parser.add_argument("--many", type=int, default=100_000, metavar="N", help="lines of the second run (%(default)s)")
    parser.add_argument("--bound-share", type=float, default=0.10, help="share a peak may grow by (%(default)s)")
    parser.add_argument("--bound-mib", type=float, default=128.0, help="MiB it may grow by in addition (%(default)s)")
    parser.add_argument("--sample-s", type=float, default=0.25, help="seconds between samples (%(default)s)")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="longest run, in seconds (%(default)s)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep inputs, outputs and samples there")
    args = parser.parse_args(own)
    for flag in ("few", "many", "sample_s", "timeout_s"):
        if getattr(args, flag) <= 0:
            parser.error(f"--{flag.replace('_', '-')} is {getattr(args, flag)}; it must be above 0")
    args.flags = flags
    return args


def main() -> int:
    """Measure both runs and compare them; return 0 if all conditions hold, else 1."""
    args = parse_arguments(sys.argv[1:])
    with contextlib.ExitStack() as kept:
        directory = args.keep or Path(kept.enter_context(tempfile.TemporaryDirectory(prefix="flat-memory-")))
        directory.mkdir(parents=True, exist_ok=True)
        try:
            few = measure("few", args.few, directory, args)
            many = measure("many", args.many, directory, args)
        except RunFailedError as error:
            say(f"FAILED: {error}")
            return 1
    is_flat = report(few, many, Bound(share=args.bound_share, mib=args.bound_mib))
    say("PASSED" if is_flat else "FAILED: a process's peak grew by more than the bound")
    return 0 if is_flat else 1


if __name__ == "__main__":
    sys.exit(main())
