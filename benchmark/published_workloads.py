#!/usr/bin/env python
"""Simulates five groups of workloads of a publication on clusters that are not here, each by several policies.

W1  whole batches on 8 or 16 GPUs: DeepSeek-R1 and Kimi-K2, long prompts or long outputs
W2  strong scaling: 32 to 128 GPUs, one or two large instances against groups of 16
W3  prefill and decode on units of 16 GPUs of their own, at every ratio of eight units
W4  sequences that end within a time: rounds that aggregate candidates of the round before
W5  one small GPU and much host memory, weights streamed

Lengths are fixed; with --spread they are simulated with a standard deviation of 0.3 of their means as well. Nothing
here is measured, and no result of the publication is in this repository.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from comparison.report import table
from comparison.terminal import exit_code, say

from sgl_batch.cli.plan.durations import in_words
from sgl_batch.cli.simulate.report import Compared, policies_message
from sgl_batch.errors import ConfigError
from sgl_batch.planner.workload import Request, Workload
from sgl_batch.simulator.best import Best, best_of
from sgl_batch.simulator.cluster.hardware import cluster_named
from sgl_batch.simulator.cluster.models import model_named
from sgl_batch.simulator.intervals import interval_of
from sgl_batch.simulator.lengths import requests_like
from sgl_batch.simulator.policies import policies_named
from sgl_batch.simulator.rounds import Rounds, filling
from sgl_batch.simulator.run import simulate

_SPREAD = 0.3
# Setups of a policy that are simulated with rounds.
_SETUPS = 3
_SMALL_HOST_BYTES = 1e12
_HEADINGS = (
    "workload",
    "model",
    "hardware",
    "lengths",
    "policy",
    "time",
    "interval",
    "ratio",
    "interval",
    "idle",
    "ended",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A workload on a cluster. `requests`: one of each length, in order; `until_s`: when it is stopped.

    `rounds`: for sequences that wait for others; `at_once`: how many problems are then worked on at once, where it is
    given.
    """

    group: str
    model: str
    hardware: str
    policies: str
    requests: Sequence[Request]
    count: int
    until_s: float = math.inf
    host_bytes: float | None = None
    rounds: Rounds | None = None
    at_once: int | None = None

    def lengths(self) -> str:
        """Return the lengths in words."""
        found = dict.fromkeys(f"{one.prompt}:{one.output}" for one in self.requests)
        return f"{', '.join(found)} x {self.count}" + (
            f", {in_words(self.until_s)}" if math.isfinite(self.until_s) else ""
        )


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Yield all workloads."""
    for hardware in ("h20x8", "h20x16", "h200x8"):
        for model in ("deepseek-r1", "kimi-k2"):
            for one in (Request(8192, 2048), Request(2048, 8192)):
                yield _whole("W1", model, hardware, "batchgen,sglang,vllm", one, 6000)
    for gpus in (32, 64, 128):
        for one in (Request(12288, 4096), Request(6656, 2867)):
            ours = f"batchgen:{min(gpus, 64)}"
            yield _whole("W2", "deepseek-r1", f"h20x{gpus}", f"{ours},sglang:16", one, 10000)
    units = "batchgen:64,disaggregated:16"
    yield _whole("W3", "deepseek-r1", "h20x128", units, Request(8192, 2048), 10000)
    for minutes in (30, 60):
        yield _rounds(args, 60.0 * minutes)
    for model in ("mixtral-8x7b", "mixtral-8x22b", "deepseek-r1"):
        for one, count in ((Request(512, 256), 8500), (Request(256, 512), 36000)):
            case = _whole("W5", model, "a5000x1", "batchgen,offload", one, count)
            yield replace(case, host_bytes=_SMALL_HOST_BYTES)


def _whole(group: str, model: str, hardware: str, policies: str, one: Request, count: int) -> Case:
    return Case(group=group, model=model, hardware=hardware, policies=policies, requests=[one], count=count)


def _rounds(args: argparse.Namespace, until_s: float) -> Case:
    """Return recursive self-aggregation: more problems than end in the time, each of which goes on round by round."""
    question, output = 1024, 8192
    first = [Request(question, output)] * args.candidates
    later = [Request(question + args.aggregate * output, output)] * args.candidates
    return Case(
        group="W4",
        model="deepseek-r1",
        hardware="h20x16",
        policies="batchgen,sglang",
        requests=[*first, *(later * (args.rounds - 1))],
        count=args.sequences,
        until_s=until_s,
        rounds=Rounds(
            question=question,
            output=output,
            rounds=args.rounds,
            candidates=args.candidates,
            aggregate=args.aggregate,
            problems=-(-args.sequences // (args.rounds * args.candidates)),
        ),
        at_once=args.problems_at_once,
    )


def simulated(case: Case, cv: float, *, intervals: bool, collapse: bool) -> list[dict[str, Any]]:
    """Return the policies of a case, as `sgl-batch simulate --json` has them."""
    model, cluster = model_named(case.model), cluster_named(case.hardware)
    if case.host_bytes is not None:
        cluster = replace(cluster, host_memory_bytes=case.host_bytes)
    requests = requests_like(Workload(requests=case.requests, count=case.count), case.count, cv=cv)
    compared = []
    for policy in policies_named(case.policies):
        try:
            best = best_of(policy, model, cluster, requests, collapse=collapse or bool(case.rounds), until=case.until_s)
            if case.rounds is not None:
                best = best_in_rounds(best, case.rounds, case.at_once, cv=cv, until=case.until_s)
        except ConfigError as error:
            compared.append(Compared(policy=policy, why=str(error)))
            continue
        wanted = intervals and math.isinf(case.until_s)
        interval = interval_of(best, requests) if wanted else None
        compared.append(Compared(policy=policy, best=best, interval=interval))
    return policies_message(compared)


def best_in_rounds(without: Best, rounds: Rounds, at_once: int | None, *, cv: float, until: float) -> Best:
    """Return the best run of problems in rounds, and the other runs: of some setups, each with some problems at once.

    `without`: the setups, from the best, where all sequences are queued at the start. Their limits are for the mean
    length; in the first round, whose prompts are short, more sequences may fit.
    """
    runs = []
    for setup in [one.setup for one in (without.result, *without.others)][:_SETUPS]:
        one, choice = setup.deployment, setup.choice
        last = one.running_tokens / (rounds.question + (rounds.aggregate + 0.5) * rounds.output)
        first = int(one.running_tokens / (rounds.question + rounds.output))
        some = filling(rounds, min(choice.rows, last) * one.ranks * one.instances, one.instances)
        for rows in sorted({choice.rows, max(choice.rows, first)}):
            limited = replace(setup, choice=replace(choice, rows=rows))
            for each in [replace(rounds, at_once=at_once)] if at_once else some:
                runs.append(simulate(limited, each.requests(cv), until=until, rounds=each))
    runs.sort(key=lambda run: (-run.counts.finished, run.seconds))
    return Best(result=runs[0], others=runs[1:], compared=without.compared)


def row(case: Case, cv: float, one: dict[str, Any]) -> list[str]:
    """Return a policy's row of the table."""
    head = [case.group, case.model, case.hardware, case.lengths() + (f", cv {cv}" if cv else ""), one["title"]]
    if "seconds" not in one:
        return [*head, "does not fit", "", "", "", "", ""]
    ends, ratios = one.get("interval"), one.get("ratio_interval")
    flips = " *" if ends and ends["flips"] else ""
    return [
        *head,
        in_words(one["seconds"]) + flips,
        f"{in_words(ends['low_s'])} to {in_words(ends['high_s'])}" if ends else "",
        f"{one['ratio']:.2f}" if "ratio" in one else "",
        f"{ratios[0]:.2f} to {ratios[1]:.2f}" if ratios else "",
        f"{one['idle']:.0%}",
        f"{one['counts']['finished']:,}"
        + (f", {one['problems_at_once']} problems at once" if "problems_at_once" in one else ""),
    ]


def main() -> int:
    """Simulate the groups that are asked for, and print a table of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="W1,W5", help="groups to simulate (default: all)")
    parser.add_argument(
        "--spread", action="store_true", help="with lengths that differ as well; takes many times longer"
    )
    parser.add_argument("--no-intervals", action="store_true", help="leave out how sure times are")
    parser.add_argument("--collapse", action="store_true", help="simulate one rank for all of an instance")
    parser.add_argument("--rounds", type=int, default=10, help="of W4: rounds of a problem")
    parser.add_argument("--candidates", type=int, default=16, help="of W4: candidates of a round")
    parser.add_argument("--aggregate", type=int, default=4, help="of W4: candidates that a later prompt holds")
    parser.add_argument(
        "--problems-at-once",
        type=int,
        metavar="N",
        help="of W4 (default: the best of as many as fill all ranks, and more)",
    )
    parser.add_argument("--sequences", type=int, default=8000, help="of W4: how many there are; more than end")
    parser.add_argument("--record", type=Path, default=Path("published_workloads.json"), help="where results go")
    args = parser.parse_args()
    wanted, rows, record = {word.strip() for word in args.only.upper().split(",") if word.strip()}, [], []
    groups = {case.group for case in cases(args)}
    if not wanted <= groups:
        parser.error(f"--only is {args.only}; there are {', '.join(sorted(groups))}")
    for case in cases(args):
        if wanted and case.group not in wanted:
            continue
        for cv in (0.0, _SPREAD) if args.spread else (0.0,):
            began = time.monotonic()
            found = simulated(case, cv, intervals=not args.no_intervals, collapse=args.collapse)
            rows += [row(case, cv, one) for one in found]
            record.append({**_named(case), "cv": cv, "policies": found, "took_s": round(time.monotonic() - began, 1)})
            args.record.write_text(
                json.dumps({"command": sys.argv, "cases": record}, indent=1) + "\n", encoding="utf-8"
            )
            say(f"{case.group} {case.model} {case.hardware} {case.lengths()} cv {cv}: {record[-1]['took_s']} s")
    print(table(_HEADINGS, rows))
    return 0


def _named(case: Case) -> dict[str, Any]:
    until = {"until_s": case.until_s} if math.isfinite(case.until_s) else {}
    return {"group": case.group, "model": case.model, "hardware": case.hardware, "lengths": case.lengths(), **until}


if __name__ == "__main__":
    sys.exit(exit_code("published_workloads", main))
