"""Owns the command `ranks.py long-tail`: its arguments, the order of runs, the record."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from comparison import machine
from comparison.terminal import exit_code, say
from comparison.workload import model_config

from long_tail.cases import Case, Sizes, chosen, make_cases
from long_tail.record import Record, read_record
from long_tail.report import draw, text
from long_tail.runs import measure_rates, run_case
from sgl_batch.errors import ConfigError, EngineError

_ROOT = Path(__file__).resolve().parents[2]
_DESCRIPTION = """\
Measure the last sequences of a batch on ranks with an equal share of the cores each, and judge the bars. Each engine is
a fresh process; cases alternate, the odd rounds in the order given here and the even ones backwards.

  a, b   --many and --few sequences with a long tail:
           separate     engines of one rank that run at once, each with an equal part of the tokens
           nothing      on all ranks; no sequence moves
           migration    sequences move while some wait, and stay in the tail
           spread       they move in the tail too
           partition    spread, and at most --partition-below sequences are computed by all ranks together
           speculation  spread, with drafts
           all          spread, partition and drafts
         b longest      the longest sequence of b alone, partitioned
  c      one straggler that repeats itself: one rank; drafts (one rank); nothing, partition and all, on all ranks
  d      one long prompt: one rank; partition, on all ranks

Bars: a, all: at most 1.10 x separate. b, all: at most 1.25 x separate or longest, whichever takes longer. c: partition
at least 1.4 x as fast as one rank, drafts 1.3 x more. d: partition at least 1.6 x as fast as one rank. For c and d the
rates of the cores are measured in each round: weights that all read together over what one rank's read alone, and
products.
"""
_EPILOG = """\
example:
  python benchmark/ranks.py long-tail --model models/qwen3moe-1b --rounds 5 --out out/tail --plot out/tail/idle.png
  python benchmark/ranks.py long-tail --model models/qwen3moe-1b --rounds 2 --out out/tail --only "c,d one rank"
      two more rounds of some cases
"""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments."""
    parser = argparse.ArgumentParser(
        prog="ranks.py long-tail",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    usual = Sizes()
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory in Hugging Face format")
    parser.add_argument("--only", default="", metavar="CASE,...", help="letters or cases, as in `a all,c` (all)")
    parser.add_argument("--rounds", type=int, default=5, help="to be added to the record; 0: report what it has (5)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="record and logs (benchmark/out/long-tail-DATE-TIME)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw idle time over time; needs matplotlib")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="limit of one run, start included (600)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="CSV that the lengths of a and b are drawn from")
    for name, what in (
        ("ranks", "of an engine with several"),
        ("many", "sequences of a"),
        ("few", "sequences of b"),
        ("input-tokens", "of a prompt of a and b, on average"),
        ("output-tokens", "of an output of a and b, on average"),
        ("straggler-tokens", "of the output of c"),
        ("prompt-tokens", "of the prompt of d"),
        ("partition-below", "of the engines that partition"),
        ("partition-least-tokens", "of the engines that partition"),
        ("boundary-tokens", "decode steps from boundary to boundary"),
        ("page-size", "tokens of a page"),
        ("seed", "of prompts, their order, and what is drawn"),
    ):
        default = getattr(usual, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} ({default})")
    parser.add_argument(
        "--prompt-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the engine in `d partition`, as partition_below=1; repeatable",
    )
    return parser.parse_args(argv)


def sizes_of(options: argparse.Namespace) -> Sizes:
    """Return the sizes of the cases. Raises ConfigError."""
    more = {}
    for one in options.prompt_option:
        name, sign, value = one.partition("=")
        if not sign:
            raise ConfigError(f"--prompt-option is {one!r}; it takes NAME=VALUE, as in partition_below=1")
        more[name.replace("-", "_")] = _value(value)
    given = {name: value for name, value in vars(options).items() if name in Sizes.__dataclass_fields__}
    return Sizes(**given, prompt_options=more)


def _value(text_of_it: str) -> Any:
    """Return a number or a truth value as such, and other texts as they are."""
    try:
        return json.loads(text_of_it)
    except json.JSONDecodeError:
        return text_of_it


def measure(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run the rounds, write the record, print the report; return the exit code."""
    started = datetime.now().astimezone()
    if options.rounds < 0:
        raise ConfigError(f"--rounds is {options.rounds}; it must be at least 0")
    sizes = sizes_of(options)
    cases = make_cases(sizes, model_config(options.model))
    wanted = chosen(cases, options.only)
    out = (options.out or _ROOT / "benchmark" / "out" / f"long-tail-{started:%Y%m%d-%H%M%S}").resolve()
    model = options.model.resolve()
    settings = json.loads(json.dumps({"model": str(model), **asdict(sizes)}, default=str))
    record = read_record(out / "record.json", settings)
    code = 0
    if options.rounds:
        out.mkdir(parents=True, exist_ok=True)
        record.sessions.append(_session(started, argv))
        # Report on SIGTERM as after Ctrl-C: engines are in sessions of their own and would stay behind.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        code = _run_rounds(record, wanted, options, model, sizes.ranks, out)
    print(_head(record, model) + "\n\n" + text(record, cases), end="")
    if options.plot is not None:
        draw(record, cases, options.plot)
    return code


def _run_rounds(
    record: Record, wanted: Sequence[Case], options: argparse.Namespace, model: Path, num_ranks: int, out: Path
) -> int:
    """Add rounds to the record, written after each run; return the exit code. A run that fails is left out."""
    first, code = record.last_round + 1, 0
    last = first + options.rounds - 1
    say(f"logs in {out}")
    try:
        for number in range(first, last + 1):
            if any(case.name[0] in "cd" for case in wanted):
                record.rates.append(measure_rates(out, number, num_ranks))
            for case in wanted if number % 2 else wanted[::-1]:
                stem = out / f"{number}-{case.name.replace(' ', '-')}"
                try:
                    run = run_case(case, model, stem, number, num_ranks, options.timeout_s)
                except EngineError as error:
                    say(f"round {number} of {last}, {error}")
                    code = 2
                    continue
                record.runs.append(run)
                record.write(out / "record.json")
                say(f"round {number} of {last}, {case.name}: {run.seconds:.2f} s, with its start {run.took_s:.1f} s")
    except KeyboardInterrupt:
        say("interrupted; reporting what is finished")
        return 130
    return code


def _session(started: datetime, argv: Sequence[str]) -> dict[str, Any]:
    """Return what the record keeps of this command."""
    return {
        "argv": list(argv),
        "machine": machine.hardware(),
        "source": machine.source(_ROOT),
        "started": started.isoformat(timespec="seconds"),
    }


def _head(record: Record, model: Path) -> str:
    """Return which machine, model, commits and commands the record is of."""
    lines = [f"{model.name}. {machine.describe(record.sessions[-1]['machine'])}."] if record.sessions else []
    for one in record.sessions:
        source = one["source"]
        changed = f" with {source['changed_files']} changed files" if source["changed_files"] else ""
        commit = (source["commit"] or "no git commit")[:12]
        lines.append(f"{one['started']}, {commit}{changed}: `python benchmark/ranks.py {shlex.join(one['argv'])}`")
    return "\n\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv`: behind `long-tail`. User errors end it with one line instead of a traceback."""
    options = parse(argv)
    return exit_code("ranks.py long-tail", lambda: measure(options, ["long-tail", *argv]))
