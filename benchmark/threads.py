#!/usr/bin/env python
"""Owns the measurement of numbers of threads: seconds, processor seconds and tokens of one workload, alternating."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from comparison import machine
from comparison.child import measured_by_child
from comparison.figures import length_fault, spread
from comparison.report import table
from comparison.terminal import exit_code, say
from comparison.workload import Workload, check_fits, model_config, random_workload

from sgl_batch.errors import ConfigError, EngineError

ROOT = Path(__file__).resolve().parent.parent
# What an engine may take of its cores. The core of one thread has its other processes too.
BAR = 1.05
DESCRIPTION = """\
Measure the same random prompts in sgl_batch with several numbers of threads (OMP_NUM_THREADS), each in a fresh process,
alternating round by round. Timed is the answering of all prompts. Greedy tokens must be the same in all.

Processor seconds are those of all processes of the engine meanwhile, user and system. The cores of a number of threads
are as many, or those of the machine where these are fewer. An engine keeps to its share of them if processor seconds
are at most 1.05 x cores x seconds. Processor seconds far above those of one thread are threads that spin as they wait.
"""
EPILOG = """\
example:
  python benchmark/threads.py --model models/qwen3moe-1b --num-prompts 32 --rounds 2

Exit codes: 0 all finished with the same tokens, 1 bad usage or a failed engine, 2 tokens differ.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One engine's answering of all prompts. `cores`: those that its threads can keep busy."""

    cores: int
    wall_s: float
    cpu_s: float
    cpus_of_others: float
    outputs: list[list[int]]

    @property
    def share(self) -> float:
        """Processor seconds by cores x seconds."""
        return self.cpu_s / (self.cores * self.wall_s)

    def figures(self) -> dict[str, float]:
        """Return all but the outputs."""
        found = {name: getattr(self, name) for name in ("cores", "wall_s", "cpu_s", "cpus_of_others")}
        return {**found, "share": self.share}


def parse_threads(text: str) -> list[int]:
    """Return the numbers of threads, each once. Raises ConfigError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"--threads is {text!r}; it has numbers of at least 1 with commas between, such as 1,2,4")
    return list(dict.fromkeys(map(int, words)))


def measure(options: argparse.Namespace, numbers: Sequence[int], workload: Workload, out: Path) -> list[dict[int, Run]]:
    """Return the runs of each round by their threads; every second round goes the other way. Raises EngineError."""
    spec = {
        "engine": "sgl_batch",
        "model": str(options.model.resolve()),
        "dtype": options.dtype,
        "prompts": workload.prompts,
        "output_lens": workload.output_lens,
        "arguments": {},
    }
    rounds: list[dict[int, Run]] = []
    for index in range(options.rounds):
        rounds.append({})
        for threads in numbers if index % 2 == 0 else numbers[::-1]:
            name = f"round-{index + 1}-threads-{threads}"
            found, reason = measured_by_child(
                name, spec, out, runner="run_round.py", limit_s=options.timeout_s, threads=threads
            )
            run = rounds[-1][threads] = run_of(found, reason, threads, workload)
            say(f"round {index + 1}/{options.rounds}, {threads} threads: {run.wall_s:.1f} s, {run.cpu_s:.1f} CPU s")
    return rounds


def run_of(found: Mapping[str, Any], reason: str | None, threads: int, workload: Workload) -> Run:
    """Return the run of what a process has measured. Raises EngineError where it measured nothing whole."""
    reason = reason or length_fault(found["outputs"], workload.output_lens)
    if reason is None and found["cpu_s"] is None:
        reason = "/proc does not say what processes take"
    if reason is not None:
        raise EngineError(f"the engine with {threads} threads failed: {reason}")
    return Run(
        cores=min(threads, len(os.sched_getaffinity(0))),
        wall_s=found["wall_s"],
        cpu_s=found["cpu_s"],
        cpus_of_others=found["cpus_of_others"],
        outputs=found["outputs"],
    )


def same_tokens(rounds: Sequence[Mapping[int, Run]]) -> bool:
    """Return whether all runs have the same tokens."""
    outputs = [run.outputs for done in rounds for run in done.values()]
    return all(one == outputs[0] for one in outputs)


def markdown(rounds: Sequence[Mapping[int, Run]]) -> str:
    """Return the table of rounds that are whole: a row for each number of threads, beside the fewest."""
    least = min(rounds[0])
    rows = []
    for threads in sorted(rounds[0]):
        runs = [done[threads] for done in rounds]
        ratios = [done[threads].cpu_s / done[least].cpu_s for done in rounds]
        figures = [
            spread(run.wall_s for run in runs),
            spread(run.cpu_s for run in runs),
            spread(run.share for run in runs),
            spread(ratios),
        ]
        share = statistics.median(run.share for run in runs)
        cells = ["" if figure is None else figure.text(2) for figure in figures]
        rows.append([str(threads), str(runs[0].cores), *cells, "yes" if share <= BAR else "NO"])
    headings = ["threads", "cores", "seconds", "CPU s", "CPU s / (cores x s)", f"CPU s beside {least}", f"<= {BAR}"]
    same = "The same tokens in all." if same_tokens(rounds) else "TOKENS DIFFER."
    others = spread(run.cpus_of_others for done in rounds for run in done.values())
    load = "" if others is None else f" Other programs kept {others.text(1)} cores busy."
    return f"{table(headings, rows)}\n\nMedian (smallest-largest) of {len(rounds)} rounds. {same}{load}\n"


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory in Hugging Face format")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="(bfloat16)")
    parser.add_argument("--threads", default="1,2,4", help="numbers of threads (1,2,4)")
    parser.add_argument("--num-prompts", type=int, default=32, help="(32)")
    parser.add_argument("--input-len", type=int, default=128, help="tokens of a prompt (128)")
    parser.add_argument("--output-len", type=int, default=32, help="tokens to generate (32)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (0)")
    parser.add_argument("--rounds", type=int, default=2, help="(2)")
    parser.add_argument("--timeout-s", type=float, default=1200.0, help="limit of one run, start included (1200)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="for record and logs (benchmark/out/threads-DATE-TIME)")
    return parser.parse_args(argv)


def build_workload(options: argparse.Namespace) -> Workload:
    """Return the prompts. Raises ConfigError for options that do not fit, or fit no model."""
    if options.rounds < 1:
        raise ConfigError(f"--rounds is {options.rounds}; it must be at least 1")
    config = model_config(options.model)
    workload = random_workload(
        num_prompts=options.num_prompts,
        input_len=options.input_len,
        spread=0,
        output_len=options.output_len,
        vocabulary=config["vocab_size"],
        seed=options.seed,
    )
    check_fits(workload, config)
    return workload


def main(argv: Sequence[str]) -> int:
    """Measure, and write report and record."""
    options = parse_arguments(argv)
    workload, numbers = build_workload(options), parse_threads(options.threads)
    started = datetime.now().astimezone()
    out = options.out or ROOT / "benchmark" / "out" / f"threads-{started:%Y%m%d-%H%M%S}"
    out.mkdir(parents=True, exist_ok=True)
    source, hardware = machine.source(ROOT), machine.hardware()
    say(f"{workload.description}; logs in {out}")
    rounds = measure(options, numbers, workload, out)
    text = f"{workload.description}; {options.model.name}, {options.dtype}.\n\n{machine.describe(hardware)}.\n\n"
    text += markdown(rounds)
    record = {
        "machine": hardware,
        "source": source,
        "command": ["python", "benchmark/threads.py", *argv],
        "started": started.isoformat(),
        "rounds": [{threads: run.figures() for threads, run in done.items()} for done in rounds],
        "same_tokens": same_tokens(rounds),
    }
    (out / "record.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (out / "report.md").write_text(text, encoding="utf-8")
    print(text, end="")
    return 0 if same_tokens(rounds) else 2


def run(argv: Sequence[str]) -> int:
    """Run the command; a failed engine is one line too."""
    try:
        return main(argv)
    except EngineError as error:
        print(f"threads.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(exit_code("threads.py", lambda: run(sys.argv[1:])))
