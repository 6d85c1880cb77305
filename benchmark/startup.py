#!/usr/bin/env python
"""Owns the measurement of start-up: from the start of a program to its engine's readiness, first token and end.

The programs start by turns: the `sgl-batch run` command over one line, and a Python program with sgl_batch's Engine or
stock SGLang's. All answer one request for one token. Processor seconds are those of the program and of all that it
started: unlike the others they hardly change where other programs share the cores.

A warm start has the checkpoint's files in the page cache, and a cold one nothing at all; emptying the cache takes root.
Before each round of cold starts the same files are read without an engine, past the page cache and through it, and new
memory is taken. The load rate is that of the phase in which the model is made and its weights are read, by the log of
--log-startup.

A virtual machine may give free memory back to its host seconds after it was used, and gets it again slowly; then new
memory is what a cold start waits for. With --hold-memory so much is held, and freed as a program takes memory: it then
starts as on a machine that keeps its memory. New memory is then measured that way too. Hold more than twice the
weights: the command takes memory for them while it imports, and frees it for the engine.
"""

from __future__ import annotations

import argparse
import json
import re
import selectors
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from comparison import machine, reading
from comparison.child import TreeUsage
from comparison.figures import Spread, spread
from comparison.held_memory import held_memory

from sgl_batch.checkpoint.read_ahead import weight_files

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ("command", "sgl_batch", "stock")
WARM, COLD = "warm", "cold"
# What a program prints when it has come so far.
READY, FIRST_TOKEN = "ready", "first token"
_COMMAND_MARKS = {"0/1 lines": READY, "1/1 lines": FIRST_TOKEN}
_SAMPLE_S = 0.05
_MEMORY_BYTES = 2 << 30
# Virtual machines give memory back within this time.
_SETTLE_S = 12.0
_PIPE_BYTES = 1 << 16
_LOADED = re.compile(r"([\d.]+) s +[^\d ].*? model made, weights read, ([\d.]+) GB")
_LINE = {
    "custom_id": "first",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"model": "tiny", "prompt": "Return the", "max_tokens": 1, "temperature": 0},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Seconds since a program was started at each mark and at its end, and the processor seconds it took in all.

    peak_bytes: resident memory at most, of all its processes. What they share, as mapped files, counts in each.
    load_rate: bytes of weights per second of the phase that loads them; None where the program does not say.
    """

    marks_s: dict[str, float]
    end_s: float
    cpu_s: float
    peak_bytes: int
    load_rate: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bytes per second: of the files past the page cache and through it, cold, and of new memory."""

    direct: float
    cached: float
    memory: float


def mark_of(line: str) -> str | None:
    """Return the mark that a line of a program's output sets, or None."""
    if line.strip() in (READY, FIRST_TOKEN):
        return line.strip()
    return next((mark for text, mark in _COMMAND_MARKS.items() if text in line), None)


def load_rate_of(line: str) -> float | None:
    """Return the bytes per second at which weights were loaded, where a line of a program's output says so."""
    found = _LOADED.search(line)
    return None if found is None else float(found[2]) * 1e9 / max(float(found[1]), 1e-9)


def measure(command: list[str]) -> Start:
    """Start the program and watch it to its end. Raises RuntimeError, with its output, where it fails."""
    began, marks, text, usage = time.monotonic(), {}, [], TreeUsage()
    load_rate: float | None = None
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0) as program:
        assert program.stdout is not None
        selector, rest = selectors.DefaultSelector(), ""
        selector.register(program.stdout, selectors.EVENT_READ)
        while True:
            usage.sample(program.pid)
            if not selector.select(timeout=_SAMPLE_S):
                continue
            found = program.stdout.read(_PIPE_BYTES)
            if not found:
                break
            *lines, rest = (rest + found.decode(errors="replace")).split("\n")
            for line in lines:
                text.append(f"{line}\n")
                load_rate = load_rate_of(line) or load_rate
                mark = mark_of(line)
                if mark is not None:
                    marks.setdefault(mark, time.monotonic() - began)
        code = program.wait()
    if code != 0 or set(marks) != {READY, FIRST_TOKEN}:
        raise RuntimeError(f"{' '.join(command)} ended with {code} after {sorted(marks)}:\n{''.join(text[-30:])}")
    return Start(
        marks_s=marks,
        end_s=time.monotonic() - began,
        cpu_s=usage.cpu_s,
        peak_bytes=usage.peak_rss_bytes,
        load_rate=load_rate,
    )


def command_of(program: str, model: Path, scratch: Path, number: int, flags: Sequence[str] = ()) -> list[str]:
    """Return the command line that starts a program. `flags`: of `sgl-batch run` alone."""
    if program != "command":
        return [sys.executable, str(ROOT / "benchmark" / "runners" / "first_token.py"), program, str(model)]
    source, output = scratch / "in.jsonl", scratch / f"out-{number}.jsonl"
    source.write_text(json.dumps(_LINE) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "sgl_batch.cli", "run", "-i", str(source), "-o", str(output)]
    command += ["--model", str(model), "--served-model-name", "tiny", "--progress", "plain", "--log-startup"]
    return [*command, *flags]


def bounds_of(files: list[Path], held_bytes: int) -> Bounds:
    """Measure what bounds a cold start. It leaves the page cache empty."""
    reading.drop_caches()
    direct = reading.direct_rate(files)
    cached = reading.cached_rate(files)
    with settled(held_bytes):
        memory = reading.memory_rate(_MEMORY_BYTES)
    return Bounds(direct=direct, cached=cached, memory=memory)


@contextmanager
def settled(held_bytes: int) -> Iterator[None]:
    """Inside, the page cache is empty, and free memory is what it is on a machine that has been idle.

    `held_bytes`: if any, of the memory that programs get as if it had just been in use.
    """
    reading.drop_caches()
    if held_bytes:
        with held_memory(held_bytes):
            yield
    else:
        time.sleep(_SETTLE_S)
        yield


def table(starts: dict[str, list[Start]]) -> str:
    """Medians with the smallest and largest of each figure, in Markdown."""
    lines = ["| program | ready | first token | end | processor seconds | GiB at most |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: |")
    for program, own in starts.items():
        columns = [
            spread(start.marks_s[READY] for start in own),
            spread(start.marks_s[FIRST_TOKEN] for start in own),
            spread(start.end_s for start in own),
            spread(start.cpu_s for start in own),
            spread(start.peak_bytes / 2**30 for start in own),
        ]
        lines.append(f"| {program} | {' | '.join(column.text(1) for column in columns if column is not None)} |")
    return "\n".join(lines)


def load_table(starts: dict[str, list[Start]], bounds: list[Bounds]) -> str:
    """The load rates, and their shares of the bounds measured in the same rounds, in Markdown; empty without any."""
    limits = {
        "files past the page cache": [bound.direct for bound in bounds],
        "files through the page cache": [bound.cached for bound in bounds],
        "new memory": [bound.memory for bound in bounds],
    }
    lines = ["| | GB/s |", "| --- | ---: |"]
    lines += [f"| {name} | {found.text(2)} |" for name, rates in limits.items() if (found := _gigabytes(rates))]
    for program, own in starts.items():
        rates = [start.load_rate for start in own if start.load_rate is not None]
        found = _gigabytes(rates)
        if found is None:
            continue
        lines.append(f"| weights of {program} | {found.text(2)} |")
        for name, limit in limits.items():
            share = spread(100 * rate / bound for rate, bound in zip(rates, limit, strict=False))
            if share is not None:
                lines.append(f"| of the {name} | {share.text(0)} % |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _gigabytes(rates: list[float]) -> Spread | None:
    return spread(rate / 1e9 for rate in rates)


def run_rounds(caches: str, options: argparse.Namespace, files: list[Path]) -> None:
    """Measure all programs by turns with the page cache warm or cold, and print each start and the tables."""
    starts: dict[str, list[Start]] = {program: [] for program in options.programs}
    bounds: list[Bounds] = []
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(options.rounds):
            if caches == COLD:
                bounds.append(bounds_of(files, options.hold_memory << 30))
            for program, own in starts.items():
                if caches == WARM:
                    reading.cached_rate(files)
                with settled(options.hold_memory << 30) if caches == COLD else nullcontext():
                    start = measure(command_of(program, options.model, Path(scratch), number, options.flags))
                own.append(start)
                marks = ", ".join(f"{mark} {seconds:.1f} s" for mark, seconds in start.marks_s.items())
                print(f"round {number + 1}, {caches}: {program}: {marks}, end {start.end_s:.1f} s", flush=True)
    print(f"\n{caches.capitalize()}, seconds, median (smallest-largest) of {options.rounds} rounds:\n\n{table(starts)}")
    print(f"\n{load_table(starts, bounds)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "test" / "models" / "tiny-qwen3-moe")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--caches", nargs="+", choices=(WARM, COLD), default=[WARM])
    parser.add_argument("--hold-memory", type=int, default=0, metavar="GIB", help="for cold starts (default: none)")
    parser.add_argument("--flags", type=shlex.split, default=[], help="for `sgl-batch run`, in one argument")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    files = weight_files(options.model)
    print(f"{machine.describe(machine.hardware())}, {machine.source(ROOT)}", flush=True)
    print(f"{options.model}: {reading.total_bytes(files) / 1e9:.2f} GB in {len(files)} files", flush=True)
    for caches in options.caches:
        why_not = reading.why_not_droppable() if caches == COLD else None
        if why_not is None:
            run_rounds(caches, options, files)
        else:
            print(f"no cold starts: {why_not}", flush=True)


if __name__ == "__main__":
    main()
