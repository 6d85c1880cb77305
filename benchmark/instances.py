#!/usr/bin/env python
"""Measures instances: one job on one and two engines of one core each, against engines that know nothing of each other.

  lone          sgl-batch run, one engine on one core
  one           the same as one instance
  separate      two lone engines at once, each with half of the lines: what two cores can do
  two           two instances, fed ahead of what they compute
  not ahead     two instances, fed with as many lines as they compute at a time
  slowed        two instances, of which one stands still for half of the time
  killed        two instances, of which one is killed in the middle

Times leave out the start of engines. Cases alternate; medians count. Needs two cores and nothing else that runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from comparison.figures import spread
from comparison.report import table
from comparison.terminal import exit_code, say
from several_instances.engines import Samples
from several_instances.runs import Case, Outcome, Work, run_case

from sgl_batch.errors import ConfigError

_SLOWED_RATE = 1.5  # of two engines, one of which has half of its time


def cases(ahead: int) -> list[Case]:
    """Return the cases. `ahead`: lines of an instance that computes as many at a time."""
    return [
        Case(name="lone"),
        Case(name="one", instances=1),
        Case(name="separate", separate=2),
        Case(name="two", instances=2),
        Case(name="not ahead", instances=2, ahead=ahead),
        Case(name="slowed", instances=2, slowed=True),
        Case(name="killed", instances=2, killed_at=0.5),
    ]


def named(known: Sequence[Case], only: str) -> list[Case]:
    """Return the cases that `only` names, with commas between them; all if it is empty. Raises ConfigError."""
    wanted = [one.strip() for one in only.split(",") if one.strip()]
    for name in wanted:
        if name not in {one.name for one in known}:
            raise ConfigError(f"--only has {name!r}; the cases are {', '.join(one.name for one in known)}")
    return [one for one in known if not wanted or one.name in wanted]


def request_lines(questions: Path, count: int, tokens: int, model: str) -> list[str]:
    """Return request lines of the questions, over and over; outputs have half to one and a half of `tokens`."""
    texts = [json.loads(line)["question"] for line in questions.read_text("utf-8").splitlines() if line]
    if not texts:
        raise ConfigError(f"{questions} has no questions")
    lines = []
    for number in range(count):
        body = {
            "model": model,
            "messages": [{"role": "user", "content": texts[number % len(texts)]}],
            "max_completion_tokens": tokens // 2 + number * 37 % (tokens + 1),
            "temperature": 0,
            "ignore_eos": True,
        }
        one = {"custom_id": f"q-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        lines.append(json.dumps(one))
    return lines


def earlier_runs(record: Path) -> dict[str, list[Outcome]]:
    """Return the runs of a record, by case; none where there is no record."""
    found: dict[str, list[Outcome]] = defaultdict(list)
    for run in json.loads(record.read_text("utf-8"))["runs"] if record.exists() else ():
        samples = {int(core): Samples(**one) for core, one in run.pop("samples").items()}
        work = [Work(**one) for one in run.pop("work")]
        found[run["case"]].append(Outcome(**run, work=work, samples=samples))
    return found


def rows(found: dict[str, list[Outcome]]) -> list[list[str]]:
    """Return the rows of the table: seconds, each case's bound, and how much of it is reached."""
    bound_s = bounds(found)
    made = []
    for name, runs in found.items():
        seconds = spread(one.seconds for one in runs)
        median_s = statistics.median(one.seconds for one in runs)
        idle = [1 - statistics.fmean(one.busy) for run in runs for one in run.samples.values() if one.busy]
        made.append(
            [
                name,
                str(len(runs)),
                seconds.text(1) if seconds else "",
                f"{bound_s[name]:.1f}" if name in bound_s else "",
                f"{bound_s[name] / median_s:.3f}" if name in bound_s else "",
                f"{max(0.0, statistics.fmean(idle)):.0%}" if idle else "",
            ]
        )
    return made


def bounds(found: dict[str, list[Outcome]]) -> dict[str, float]:
    """Return the seconds in which each case could end, from the cases against which it is measured.

    slowed: the work of the separate engines at three quarters of their speed. killed: their work, and what one of two
    engines does in the seconds of a start and of the prompts that were computed again.
    """
    median = {name: statistics.median(one.seconds for one in runs) for name, runs in found.items()}
    bound: dict[str, float] = {}
    if "lone" in median:
        bound["one"] = median["lone"]
    if "separate" not in median:
        return bound
    separate_s = median["separate"]
    bound |= {"two": separate_s, "not ahead": separate_s, "slowed": separate_s * 2 / _SLOWED_RATE}
    if "killed" in median:
        works = [work for run in found["separate"] for work in run.work]
        start_s = statistics.median(one.start_s for one in works)
        token_s = sum(one.prefill_s for one in works) / sum(one.prompt_tokens for one in works)
        tokens = sum(one.prompt_tokens for one in found["separate"][0].work)
        again = statistics.median(sum(one.prompt_tokens for one in run.work) - tokens for run in found["killed"])
        bound["killed"] = separate_s + (start_s + max(0.0, again) * token_s) / 2
    return bound


def draw(found: dict[str, list[Outcome]], target: Path) -> None:
    """Draw how much of its core each engine uses over the last run of each case."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(len(found), 1, figsize=(9, 1.6 * len(found)), layout="constrained", squeeze=False)
    for (name, runs), panel in zip(found.items(), panels[:, 0], strict=True):
        for core, one in sorted(runs[-1].samples.items()):
            panel.plot(one.times, [max(0.0, 1 - busy) for busy in one.busy], lw=1, label=f"core {core}")
        panel.set_ylim(0, 1)
        panel.set_ylabel("idle")
        panel.set_title(name, fontsize="small", loc="left")
        panel.legend(fontsize="x-small", loc="upper right")
    panels[-1, 0].set_xlabel("seconds")
    figure.savefig(target, dpi=110)


def main(argv: Sequence[str]) -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory in Hugging Face format")
    parser.add_argument("--questions", type=Path, required=True, help="a JSONL file with a field `question`")
    parser.add_argument("--lines", type=int, default=2000, help="of the job (2000)")
    parser.add_argument("--tokens", type=int, default=64, help="of an output, on average (64)")
    parser.add_argument("--ahead", type=int, default=256, help="lines of an instance that is not fed ahead (256)")
    parser.add_argument("--rounds", type=int, default=5, help="(5)")
    parser.add_argument("--only", default="", metavar="NAME,...", help="cases (default: all)")
    parser.add_argument(
        "--out",
        type=Path,
        help="where the record and the messages go; more rounds are added to a record there (a temporary directory)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw idle time over time; needs matplotlib")
    parser.add_argument("engine", nargs="*", help="flags of the engine, behind --")
    args = parser.parse_args(argv)
    # Commands are ended on SIGTERM as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    chosen = named(cases(args.ahead), args.only)
    lines = request_lines(args.questions, args.lines, args.tokens, args.model.name)
    place = args.out or Path(tempfile.mkdtemp(prefix="instances-"))
    place.mkdir(parents=True, exist_ok=True)
    found = earlier_runs(place / "record.json")
    flags = ["--served-model-name", args.model.name, *args.engine]
    begun = max(map(len, found.values()), default=0)
    for number in range(begun, begun + args.rounds):
        for case in chosen if number % 2 == 0 else chosen[::-1]:
            outcome = run_case(
                case, args.model.resolve(), lines, place / f"{number}-{case.name.replace(' ', '_')}", flags
            )
            found[case.name].append(outcome)
            say(f"round {number + 1} of {begun + args.rounds}, {case.name}: {outcome.seconds:.1f} s")
            record = {"command": sys.argv, "runs": [asdict(one) for runs in found.values() for one in runs]}
            (place / "record.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    ordered = {one.name: found[one.name] for one in cases(args.ahead) if found[one.name]}
    print(table(("case", "runs", "seconds", "bound s", "reached", "idle"), rows(ordered)))
    if args.plot is not None:
        draw(ordered, args.plot)
    if args.out is None:
        shutil.rmtree(place)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("instances", lambda: main(sys.argv[1:])))
