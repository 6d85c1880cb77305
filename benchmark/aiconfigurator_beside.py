#!/usr/bin/env python
"""Puts AIConfigurator's predictions of passes and batches beside those of the simulator's cost model.

Each case is a model on a cluster as an engine runs it in a layout. AIConfigurator is asked for prefill passes and
decode steps, with its default choices of experts and with even ones; the simulator for the same passes, with tables of
measured kernels and by the roofline alone. Whole batches of SGLang are compared as well: AIConfigurator's static batch,
whose prompts are one pass, and a simulated run. Neither was compared with a run on a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from beside import ours
from beside.asked import DEFAULT, EVEN, Asked, NotCovered, need_package, version_of
from beside.cases import BACKENDS, GPUS, MODELS, SYSTEMS, WORKLOADS, Case, Pass, cases, passes
from beside.figures import Compared, our_modules, their_modules
from beside.report import Batch, Coverage, Findings, report
from comparison.terminal import exit_code, say

from sgl_batch.errors import ConfigError
from sgl_batch.simulator.cluster.deployment import Deployment

# Sequences of each GPU in a whole batch, at most as many as fit. The batches are of clusters of one node.
_BATCH_ROWS = 32
_COMMAS = "some of {}, behind commas (all)"


def compare(case: Case, folder: Path, found: Findings) -> None:
    """Add to what was found whether a case is covered, its passes and its batches."""
    try:
        version = version_of(case)
        asked, even = (Asked(case, choices, folder) for choices in (DEFAULT, EVEN))
        first = next(passes(case, 0))
        asked.of_pass(first)
    except NotCovered as lack:
        found.coverage.append(Coverage(case=case, lacks=str(lack)))
        return
    try:
        by_tables, plain = (ours.deployment_of(case, tables=tables) for tables in (True, False))
    except ConfigError as error:
        found.coverage.append(Coverage(case=case, version=version, ours_lacks=str(error)))
        return
    found.coverage.append(Coverage(case=case, version=version))
    found.passes += _compared(case, asked, even, by_tables, plain)
    if case.engine == "sglang" and case.gpus == min(GPUS):
        found.batches += _batches(case, asked, by_tables)


def _compared(case: Case, asked: Asked, even: Asked, by_tables: Deployment, plain: Deployment) -> Iterator[Compared]:
    for work in passes(case, plain.running_tokens):
        try:
            answer = asked.of_pass(work)
        except NotCovered as lack:
            say(f"{case.text()}: {work.phase} of {work.count} x {work.length} has no prediction: {lack}")
            continue
        theirs = their_modules(answer.milliseconds)
        mine, roofline = (our_modules(ours.seconds_of(one, work), like=theirs) for one in (by_tables, plain))
        yield Compared(
            case=case,
            work=work,
            theirs=theirs,
            even=_even(even, work),
            ours=mine,
            roofline=roofline,
            measured=answer.measured,
        )


def _even(even: Asked, work: Pass) -> dict[str, float]:
    """Return the seconds with even choices; none on the GPUs that have no such tables."""
    try:
        return their_modules(even.of_pass(work).milliseconds)
    except NotCovered:
        return {}


def _batches(case: Case, asked: Asked, one: Deployment) -> Iterator[Batch]:
    for prompt, output in WORKLOADS:
        count = min(_BATCH_ROWS * case.shared, one.running_tokens // (prompt + output))
        if not count:
            continue
        try:
            prompts, steps = asked.of_batch(count, prompt, output)
        except NotCovered as lack:
            say(f"{case.text()}: a batch of {count} x {prompt}:{output} has no prediction: {lack}")
            continue
        seconds = ours.batch_seconds(one, count, prompt, output)
        yield Batch(
            case=case,
            prompt=prompt,
            output=output,
            count=count,
            their_prompts=prompts,
            their_steps=steps,
            ours=seconds,
        )


def _chosen(text: str, known: Iterable[str], flag: str) -> list[str]:
    names = list(known)
    chosen = text.split(",") if text else names
    for name in chosen:
        if name not in names:
            raise ConfigError(f"{flag} has {name!r}; it takes some of {', '.join(names)}, behind commas")
    return chosen


def main(argv: Sequence[str]) -> int:
    """Compare all cases that are asked for; print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", metavar="NAMES", help=_COMMAS.format(", ".join(MODELS)))
    parser.add_argument("--hardware", default="", metavar="NAMES", help=_COMMAS.format(", ".join(SYSTEMS)))
    parser.add_argument("--engines", default="", metavar="NAMES", help=_COMMAS.format(", ".join(BACKENDS)))
    parser.add_argument("--every", action="store_true", help="print each pass and batch as well")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all passes and batches there")
    args = parser.parse_args(argv)
    need_package()
    models, gpus = _chosen(args.models, MODELS, "--models"), _chosen(args.hardware, SYSTEMS, "--hardware")
    chosen = list(cases(models, gpus, engines=_chosen(args.engines, BACKENDS, "--engines")))
    found = Findings()
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(chosen, 1):
            compare(case, Path(folder), found)
            last = found.coverage[-1]
            say(f"{number}/{len(chosen)} {case.text()}: {last.lacks or last.ours_lacks or 'compared'}")
    if args.json:
        record = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "command": argv, **dataclasses.asdict(found)}
        args.json.write_text(json.dumps(record, indent=1), encoding="utf-8")
    print(report(found, every=args.every))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("aiconfigurator_beside.py", lambda: main(sys.argv[1:])))
