#!/usr/bin/env python
"""Owns the command that compares sgl_batch with stock SGLang on one GPU, a regime at a time. Not yet run on a GPU."""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from comparison import machine
from comparison.terminal import exit_code, say
from gpu_comparison.cases import Regime, Role, Settings
from gpu_comparison.regimes import OURS, REGIMES, STOCK, Place, build
from gpu_comparison.repeated_checkpoint import write_checkpoint
from gpu_comparison.report import About, as_json, markdown
from gpu_comparison.visits import Found, Run, compared

from sgl_batch.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
DESCRIPTION = """\
Measure one regime through sgl_batch and stock SGLang on one GPU, each visit in a fresh process. Weights are dummies on
the shape of a real model; prompts are random token ids, and every sequence generates as many tokens as were asked for.

  kv            decode with ten times the KV that the device may hold (12 GiB): asked for 1.3 times stock
  tight         120 GB of weights leave little room for KV: 1.5 times
  weights       weights larger than a device budget of 24 GiB: 3 times, and 70 % of what the host's copy rate allows
  prefill       prompts of 8,192 tokens, 1,024 generated: 1.1 times
  accumulation  the same kernels with one expert call for a group and with many: what the design itself gains

The first round has our configuration and all of stock's, a small sweep; the fastest of these is compared in the later
rounds, with the order changed each time. Both engines have the same attention backend. A configuration that fails is
reported with the last line of its log, and the run goes on. The record and the report are written after each visit.
"""
EPILOG = """\
what a visit takes, by arithmetic for one H200 (nothing has been measured): start-up 40 to 70 s, and then
  kv            120 to 150 s with 48 layers, in proportion to --layers (which scales KV and weights alike, so that as
                many sequences fit); three visits fit ten minutes, five with --layers 24
  tight         50 to 70 s; start-up is longer, as 120 GB of dummies are drawn
  weights       40 s, and once a minute to write 41 GB into --scratch; loading takes 40 to 100 s; 60 GB of host memory
  prefill       30 to 40 s
  accumulation  15 to 60 s
Host memory: kv 64 GiB for the store, tight 48. A longer sweep is several calls with --peers, each within its time.

examples:
  python benchmark/gpu.py kv --layers 24 --profile
  python benchmark/gpu.py prefill --minutes 9.5
  python benchmark/gpu.py kv --peers "its defaults" "hierarchical" --rounds 2
  python benchmark/gpu.py kv tight weights prefill accumulation --device cpu --scale tiny
      every regime for real on a CPU with a tiny shape, about a minute and a half each: a test of this program alone

The report goes to standard output, progress to standard error, the record, logs and traces to --out.
Exit codes: 0 our configuration and a peer have run, 1 bad usage, 2 not so, 130 interrupted.
"""


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("regimes", nargs="+", choices=list(REGIMES), metavar="REGIME", help=", ".join(REGIMES))
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
    size.add_argument("--rounds", type=int, default=2, help="(2)")
    size.add_argument("--minutes", type=float, default=9.5, help="in which a regime has to be done (9.5)")
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
    """NAME=VALUE, where a value is JSON if it parses as such and text else. Raises ConfigError."""
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
    """The memory of the first GPU, as nvidia-smi says it; 0 without one."""
    match = re.search(r"(\d+) MiB", gpus[0]) if gpus else None
    return 0 if match is None else int(match.group(1)) << 20


def place_of(options: argparse.Namespace, gpus: list[str]) -> Place:
    """Where the run takes place. Raises ConfigError for what cannot be there."""
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
    return Place(
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
    """One regime of a call of the command, in a directory of its own."""

    def __init__(
        self, regime: Regime, options: argparse.Namespace, place: Place, about: About, out: Path, scratch: Path
    ) -> None:
        self._regime, self._about, self._scratch = regime, about, scratch
        self.found = Found()
        self._settings = Settings(
            model=(scratch / f"{regime.name}-{regime.shape.layers}-layers").resolve(),
            out=out,
            rounds=options.rounds,
            until_s=60 * options.minutes,
            limit_s=options.timeout_s,
            device="cuda" if place.on_gpu else "cpu",
            profile_steps=options.profile_steps if options.profile else 0,
            environment={} if place.on_gpu else {"CUDA_VISIBLE_DEVICES": ""},
        )

    def run(self) -> None:
        """Make the model and all visits."""
        self._settings.out.mkdir(parents=True, exist_ok=True)
        say(f"{self._regime.name}: {self._regime.workload.description}; logs in {self._settings.out}")
        if self._regime.checkpoint:
            write_checkpoint(self._regime.shape, self._settings.model, say)
        else:
            self._regime.shape.write(self._settings.model)
        Run(self._regime, self._settings, self.found, say=say, changed=self.write).all()

    def write(self) -> None:
        """Put the record and the report of what was found so far where those of before were."""
        record = as_json(self._regime, self.found, self._settings, self._about)
        for name, text in (("record.json", json.dumps(record, indent=1) + "\n"), ("report.md", self.report())):
            partial = self._settings.out / f"{name}.partial"
            partial.write_text(text, encoding="utf-8")
            partial.replace(self._settings.out / name)

    def report(self) -> str:
        """In Markdown."""
        return markdown(self._regime, self.found, self._settings, self._about)

    @property
    def is_whole(self) -> bool:
        """Whether ours and a peer have run, or would have where this machine lacks what every peer needs."""
        ours, best = compared(self._regime, self.found)
        peers = self._regime.of_role(Role.PEER)
        return ours is not None and (best is not None or all(case.lacking is not None for case in peers))


def measure(options: argparse.Namespace, argv: list[str]) -> int:
    """Run what is asked for and print the reports; returns the exit code."""
    started, here = datetime.now().astimezone(), machine.hardware()
    place = place_of(options, here["gpus"])
    about = About(
        command=["python", "benchmark/gpu.py", *argv],
        started=started,
        machine=here,
        source=machine.source(ROOT),
        label=f"attention backend of both: {place.backend}"
        if place.on_gpu
        else "attention: each engine's own on a CPU",
        is_tiny=place.tiny,
    )
    regimes = [build(name, place, options) for name in dict.fromkeys(options.regimes)]
    out = (options.out or ROOT / "benchmark" / "out" / f"gpu-{started:%Y%m%d-%H%M%S}").resolve()
    # Asked to end, report as after Ctrl-C: an engine's process is in a session of its own and would stay behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    whole = True
    for regime in regimes:
        own = out if len(regimes) == 1 else out / regime.name
        comparison = Comparison(regime, options, place, about, own, options.scratch or own)
        try:
            comparison.run()
        except KeyboardInterrupt:
            say("interrupted; reporting what is finished")
            print(comparison.report(), flush=True)
            return 130
        print(comparison.report(), flush=True)
        whole = whole and comparison.is_whole
    return 0 if whole else 2


def main(argv: list[str]) -> int:
    """The command. User faults end it with one line instead of a traceback."""
    options = parse(argv)
    return exit_code("gpu.py", lambda: measure(options, argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
