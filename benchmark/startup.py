#!/usr/bin/env python
"""Owns the measurement of start-up: from the start of a program to its engine's readiness, first token and end.

The programs start by turns: the `sgl-batch run` command over one line, and a Python program with sgl_batch's Engine or
stock SGLang's. All answer one request for one token. Processor seconds are those of the program and of all that it
started: unlike the others they hardly change where other programs share the cores.
"""

from __future__ import annotations

import argparse
import json
import selectors
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from comparison import machine
from comparison.child import TreeUsage
from comparison.figures import spread

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ("command", "sgl_batch", "stock")
# What a program prints when it has come so far.
READY, FIRST_TOKEN = "ready", "first token"
_COMMAND_MARKS = {"0/1 lines": READY, "1/1 lines": FIRST_TOKEN}
_SAMPLE_S = 0.05
_LINE = {
    "custom_id": "first",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"model": "tiny", "prompt": "Return the", "max_tokens": 1, "temperature": 0},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Seconds since a program was started at each mark and at its end, and the processor seconds it took in all."""

    marks_s: dict[str, float]
    end_s: float
    cpu_s: float


def mark_of(line: str) -> str | None:
    """Return the mark that a line of a program's output sets, or None."""
    if line.strip() in (READY, FIRST_TOKEN):
        return line.strip()
    return next((mark for text, mark in _COMMAND_MARKS.items() if text in line), None)


def measure(command: list[str]) -> Start:
    """Start the program and watch it to its end. Raises RuntimeError, with its output, where it fails."""
    began, marks, text, usage = time.monotonic(), {}, [], TreeUsage()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1) as program:
        assert program.stdout is not None
        selector = selectors.DefaultSelector()
        selector.register(program.stdout, selectors.EVENT_READ)
        while True:
            usage.sample(program.pid)
            if not selector.select(timeout=_SAMPLE_S):
                continue
            line = program.stdout.readline()
            if not line:
                break
            text.append(line)
            mark = mark_of(line)
            if mark is not None:
                marks.setdefault(mark, time.monotonic() - began)
        code = program.wait()
    if code != 0 or set(marks) != {READY, FIRST_TOKEN}:
        raise RuntimeError(f"{' '.join(command)} ended with {code} after {sorted(marks)}:\n{''.join(text[-30:])}")
    return Start(marks_s=marks, end_s=time.monotonic() - began, cpu_s=usage.cpu_s)


def command_of(program: str, model: Path, scratch: Path, number: int) -> list[str]:
    """Return the command line that starts a program."""
    if program != "command":
        return [sys.executable, str(ROOT / "benchmark" / "runners" / "first_token.py"), program, str(model)]
    source, output = scratch / "in.jsonl", scratch / f"out-{number}.jsonl"
    source.write_text(json.dumps(_LINE) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "sgl_batch.cli", "run", "-i", str(source), "-o", str(output)]
    return [*command, "--model", str(model), "--served-model-name", "tiny", "--progress", "plain"]


def table(starts: dict[str, list[Start]]) -> str:
    """Medians with the smallest and largest of each figure, in Markdown."""
    lines = ["| program | ready | first token | end | processor seconds |", "| --- | ---: | ---: | ---: | ---: |"]
    for program, own in starts.items():
        columns = [
            spread(start.marks_s[READY] for start in own),
            spread(start.marks_s[FIRST_TOKEN] for start in own),
            spread(start.end_s for start in own),
            spread(start.cpu_s for start in own),
        ]
        lines.append(f"| {program} | {' | '.join(column.text(1) for column in columns if column is not None)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "test" / "models" / "tiny-qwen3-moe")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"{machine.describe(machine.hardware())}, {machine.source(ROOT)}", flush=True)
    starts: dict[str, list[Start]] = {program: [] for program in options.programs}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(options.rounds):
            for program, own in starts.items():
                start = measure(command_of(program, options.model, Path(scratch), number))
                own.append(start)
                marks = ", ".join(f"{mark} {seconds:.1f} s" for mark, seconds in start.marks_s.items())
                print(f"round {number + 1}: {program}: {marks}, end {start.end_s:.1f} s", flush=True)
    print(f"\nSeconds, median (smallest-largest) of {options.rounds} rounds:\n\n{table(starts)}")


if __name__ == "__main__":
    main()
