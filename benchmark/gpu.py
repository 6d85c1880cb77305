#!/usr/bin/env python
"""Owns the command that compares sgl_batch with stock SGLang on one GPU, a regime at a time. Not yet run on a GPU."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import signal
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from comparison import machine
from comparison.terminal import exit_code, say
from gpu_comparison.cases import Regime, Role, Settings
from gpu_comparison.found import Found, compared
from gpu_comparison.machine_rates import measure_machine
from gpu_comparison.record import About, Record, regime_line, result_line, run_line, visit_lines
from gpu_comparison.regimes import REGIMES, build, names_of
from gpu_comparison.repeated_checkpoint import write_checkpoint
from gpu_comparison.report import markdown, summary
from gpu_comparison.run_setup import OURS, STOCK, RunSetup
from gpu_comparison.visits import LEAST_VISIT_S, Run

from sgl_batch.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
DESCRIPTION = """\
Compare sgl_batch with stock SGLang on one GPU, each visit in a fresh process. Weights are dummies on the shape of a
real model; prompts are random token ids; tokens are sampled at temperature 1 from seeds, as many as were asked for.
Goals, for one H200, against stock tuned in the same run:

  kv            decode with ten times the KV that the device may hold (12 GiB): 1.3 times stock
  tight         120 GB of weights leave little room for KV: 1.5 times
  weights       weights larger than a device budget of 24 GiB: 3 times, and 70 % of the copy bound
  prefill       prompts of 8,192 tokens, 1,024 generated, experts by DeepGEMM: 1.5 times
  resident      all KV and weights on the device: in no round below 1.0 times
  accumulation  the same kernels, memory and limits with one expert call for a group and with many: a finding
  accumulation-graphs  the same, with CUDA graphs in all

The first round has ours (overlap and graphs on) and all of stock's, a small sweep; the fastest of these is compared in
the later rounds, with the order changed each time. Then ours with overlap or graphs off is visited once. Each figure
has the distinct experts of a layer and step, counted, and its bound: bytes and FLOP against the rates of this machine,
measured in the same run, and of its data sheet. A configuration that fails is reported and the run goes on.
"""
EPILOG = """\
what a visit takes, by arithmetic for one H200 (nothing has been measured): start-up 40 to 70 s, and then
  kv            120 to 150 s with 48 layers, in proportion to --layers (which scales KV and weights alike, so that as
                many sequences fit); three visits fit ten minutes, five with --layers 24
  tight         50 to 70 s; start-up is longer, as 120 GB of dummies are drawn
  weights       40 s, and once a minute to write 41 GB into --scratch; loading takes 40 to 100 s; 60 GB of host memory
  prefill       30 to 40 s
  resident      30 to 60 s
  accumulation  15 to 60 s
Host memory: kv 64 GiB for the store, tight 48. A longer sweep is several calls with --peers, each within its time.

examples:
  python benchmark/gpu.py --cases kv --layers 24 --profile
  python benchmark/gpu.py --cases kv,tight --minutes 60 --rounds 5
  python benchmark/gpu.py --cases kv --peers "its defaults" "hierarchical" --rounds 2
  python benchmark/gpu.py --device cpu --scale tiny --minutes 30
      every comparison for real on a CPU with a tiny shape, about two minutes each: a test of this program alone

The report goes to standard output, progress to standard error; --out has report.md, which can be pasted, results.jsonl,
a line for each visit and result as it comes, logs and traces.
Exit codes: 0 our configuration and a peer have run in each, 1 bad usage, 2 not so, 130 interrupted.
"""


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(REGIMES), metavar="NAME,...", help="which of them, in order (all)")
    where = parser.add_argument_group("where")
    where.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="(auto: a GPU if there is one)"
    )
    where.add_argument("--attention-backend", default="triton", help="of both engines on a GPU (triton)")
    where.add_argument("--scratch", type=Path, metavar="DIR", help="for the checkpoint of weights (--out)")
    where.add_argument("--out", type=Path, metavar="DIR", help="for record and logs (benchmark/out/gpu-DATE-TIME)")
    size = parser.add_argument_group("how much")
    size.add_argument("--scale", choices=("full", "tiny"), default="full", help="(full)")
    size.add_argument("--layers", type=int, help="of the model; KV and weights go with them")
    size.add_argument("--num-prompts", type=int)
    size.add_argument("--input-len", type=int)
    size.add_argument("--output-len", type=int)
    size.add_argument("--rounds", type=int, default=3, help="(3)")
    size.add_argument(
        "--minutes",
        type=float,
        default=9.5,
        help="for the whole call, in order; what does not fit is not run (9.5)",
    )
    size.add_argument("--timeout-s", type=float, default=300.0, help="limit of one visit, start included (300)")
    what = parser.add_argument_group("what")
    what.add_argument("--peers", nargs="+", metavar="WORDS", help="only those whose names have these words in them")
    for engine in (OURS, STOCK):
        what.add_argument(
            f"--{engine.replace('_', '-')}-arg",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help=f"argument for every constructor of {engine}; repeatable",
        )
    what.add_argument("--profile", action="store_true", help="a visit more of ours, with a trace of torch's profiler")
    what.add_argument("--profile-steps", type=int, default=16, help="passes in the trace (16; 72 have a boundary)")
    return parser.parse_args(argv)


def read_arguments(flag: str, texts: list[str]) -> dict[str, Any]:
    """Parse NAME=VALUE; a value is JSON if it parses as JSON, and text otherwise. Raises ConfigError."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (equals and name.isidentifier()):
            raise ConfigError(f"{flag} is {text!r}; it has the form NAME=VALUE")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def gpu_bytes(gpus: list[str]) -> int:
    """Return the memory of the first GPU as nvidia-smi reports it; 0 without a GPU."""
    match = re.search(r"(\d+) MiB", gpus[0]) if gpus else None
    return 0 if match is None else int(match.group(1)) << 20


def setup_of(options: argparse.Namespace, gpus: list[str]) -> RunSetup:
    """Return the machine's part of the run. Raises ConfigError for settings that it cannot have."""
    on_gpu = bool(gpus) if options.device == "auto" else options.device == "cuda"
    if on_gpu and not gpus:
        raise ConfigError("--device is cuda, and nvidia-smi knows no GPU here: use --device cpu --scale tiny")
    if not on_gpu and options.scale != "tiny":
        raise ConfigError(f"--scale is {options.scale}, which is for a GPU: use --scale tiny on a CPU")
    for flag, value in (("rounds", options.rounds), ("profile-steps", options.profile_steps)):
        if value < 1:
            raise ConfigError(f"--{flag} is {value}; it must be at least 1")
    for flag, seconds in (("minutes", options.minutes), ("timeout-s", options.timeout_s)):
        if seconds <= 0:
            raise ConfigError(f"--{flag} is {seconds}; it must be more than 0")
    return RunSetup(
        on_gpu=on_gpu,
        tiny=options.scale == "tiny",
        backend=options.attention_backend,
        gpu_bytes=gpu_bytes(gpus),
        extra={
            OURS: read_arguments("--sgl-batch-arg", options.sgl_batch_arg),
            STOCK: read_arguments("--stock-arg", options.stock_arg),
        },
    )


class Comparison:
    """One regime of a call of the command, in its own directory, until the time `until_s`."""

    def __init__(
        self,
        regime: Regime,
        options: argparse.Namespace,
        setup: RunSetup,
        about: About,
        record: Record,
        *,
        out: Path,
        until_s: float,
    ) -> None:
        self.regime, self._about, self._record = regime, about, record
        self.found = Found()
        self._recorded = 0
        scratch: Path = options.scratch or out
        self._settings = Settings(
            model=(scratch / f"{regime.name}-{regime.shape.layers}-layers").resolve(),
            out=out,
            rounds=options.rounds,
            until_s=until_s,
            limit_s=options.timeout_s,
            device="cuda" if setup.on_gpu else "cpu",
            routing=setup.routing(load_format="auto" if regime.checkpoint else "dummy"),
            profile_steps=options.profile_steps if options.profile else 0,
            environment=environment_of(setup),
        )

    def run(self) -> None:
        """Make the model and run all visits."""
        self._settings.out.mkdir(parents=True, exist_ok=True)
        say(f"{self.regime.name}: {self.regime.workload.description}; logs in {self._settings.out}")
        self._record.add("regime", regime_line(self.regime, self._settings))
        began = time.monotonic()
        if self.regime.checkpoint:
            write_checkpoint(self.regime.shape, self._settings.model, say)
        else:
            self.regime.shape.write(self._settings.model)
        left = max(0.0, self._settings.until_s - (time.monotonic() - began))
        settings = dataclasses.replace(self._settings, until_s=left)
        Run(self.regime, settings, self.found, say=say, changed=self._write).all()
        self._record.add("result", result_line(self.regime, self.found, self._about))

    def _write(self) -> None:
        """Append new visits to the record, and replace the report."""
        for line in visit_lines(self.regime, self.found, self._recorded):
            self._record.add("visit", line)
        self._recorded = len(self.found.visits)
        replace_text(self._settings.out / f"{self.regime.name}.md", markdown(self.regime, self.found, self._about))

    @property
    def is_whole(self) -> bool:
        """Whether ours and a peer have run, or would have where this machine lacks what all of one side need."""
        ours, best = compared(self.regime, self.found)
        lacking = {role: all(case.lacking for case in self.regime.of_role(role)) for role in (Role.OURS, Role.PEER)}
        return (ours is not None or lacking[Role.OURS]) and (best is not None or lacking[Role.PEER])


def environment_of(setup: RunSetup) -> dict[str, str]:
    """Return the additional environment of the measured processes."""
    return {} if setup.on_gpu else {"CUDA_VISIBLE_DEVICES": ""}


def replace_text(path: Path, text: str) -> None:
    """Write a file completely or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def about_of(argv: list[str], here: dict[str, Any], setup: RunSetup, started: datetime) -> About:
    """Return where and how the command was called."""
    return About(
        command=["python", "benchmark/gpu.py", *argv],
        started=started,
        machine=here,
        source=machine.source(ROOT),
        label=f"attention backend of both: {setup.backend}"
        if setup.on_gpu
        else "attention: each engine's own on a CPU",
        is_tiny=setup.tiny,
    )


def measure(options: argparse.Namespace, argv: list[str]) -> int:
    """Run the requested regimes and print the report; return the exit code."""
    started, began, here = datetime.now().astimezone(), time.monotonic(), machine.hardware()
    setup = setup_of(options, here["gpus"])
    regimes = [build(name, setup, options) for name in names_of(options.cases)]
    out = (options.out or ROOT / "benchmark" / "out" / f"gpu-{started:%Y%m%d-%H%M%S}").resolve()
    # Report on SIGTERM as after Ctrl-C: an engine's process is in its own session and would stay behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out.mkdir(parents=True, exist_ok=True)
    rates = measure_machine(
        out, here["gpus"], on_gpu=setup.on_gpu, limit_s=options.timeout_s, environment=environment_of(setup)
    )
    about = dataclasses.replace(about_of(argv, here, setup, started), rates=rates)
    record = Record(out / "results.jsonl")
    record.add("run", run_line(about))
    done: list[Comparison] = []
    interrupted = False
    for regime in regimes:
        left = 60 * options.minutes - (time.monotonic() - began)
        if left < LEAST_VISIT_S:
            say(f"{regime.name} and what comes behind it: not run, {max(left, 0):.0f} s were left (--minutes)")
            break
        own = out if len(regimes) == 1 else out / regime.name
        done.append(Comparison(regime, options, setup, about, record, out=own, until_s=left))
        try:
            done[-1].run()
        except KeyboardInterrupt:
            say("interrupted; reporting what is finished")
            interrupted = True
            break
    parts = [(one.regime, one.found) for one in done]
    text = summary(about, parts, [regime.name for regime in regimes[len(done) :]])
    text = "\n".join([text, *(markdown(regime, found, about) for regime, found in parts)])
    replace_text(out / "report.md", text)
    print(text, flush=True)
    if interrupted:
        return 130
    return 0 if len(done) == len(regimes) and all(one.is_whole for one in done) else 2


def main(argv: list[str]) -> int:
    """Run the command. User errors end it with one line instead of a traceback."""
    options = parse(argv)
    return exit_code("gpu.py", lambda: measure(options, argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
