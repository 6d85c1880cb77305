#!/usr/bin/env python
"""Owns the command that measures ranks: workloads with migration and without, routing skewed on purpose.

`ranks.py long-tail` is long_tail/command.py: the last sequences of a batch, and the bars for them.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

import long_tail.command
from comparison import machine
from comparison.terminal import exit_code, say
from comparison.workload import Workload, check_fits, model_config
from several_ranks.measuring import Case, Comparison, kinds_of_ranks, run_all
from several_ranks.report import NOTE, as_json, markdown
from several_ranks.skewed_checkpoint import make_skewed
from several_ranks.workloads import Budget

from sgl_batch.errors import ConfigError, EngineError

_LONG_TAIL = "long-tail"
ROOT = Path(__file__).resolve().parent.parent
DESCRIPTION = """\
Measure ranks of one machine, each engine in a fresh process, alternating round by round. Each rank takes its share of
the cores; one rank alone, which they are compared with, gets such a share too. Loading and a warm-up are not timed.
`ranks.py long-tail --help` is about the last sequences of a batch: how they are spread, partitioned and drafted.

  tail     outputs with a long tail (P99 is 3.8 x P95, the longest 9 x P95): with migration, without, one rank,
           and one rank on all cores
  uneven   the same outputs, in an order in which rank 0 gets all the longest: what migration is for
  trace    prompts and outputs of requests drawn from --trace, scaled to the budget: the same
  skewed   sequences that are all alike, on a variant of the checkpoint whose routers favour a few experts of rank 0
           (all else is linked): the checkpoint as it is, the variant, one rank with the variant
"""
EPILOG = """\
examples:
  python benchmark/offline.py --make-model models/qwen3moe-1b
      the random checkpoint of docs/benchmarks.md, in half a minute
  python benchmark/ranks.py --model models/qwen3moe-1b --workload tail
      the bars for migration and boundaries
  python benchmark/ranks.py --model models/qwen3moe-1b --workload trace --trace AzureLLMInferenceTrace_conv.csv

The tables go to standard output, progress to standard error, the JSON record and a log per run to --out.
Exit codes: 0 all runs finished, 1 bad usage, 2 an engine failed, 130 interrupted; what was finished is reported.
"""


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory in Hugging Face format")
    parser.add_argument(
        "--workload",
        action="append",
        choices=("tail", "uneven", "trace", "skewed"),
        help="repeatable (all; trace where there is a --trace)",
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="CSV with ContextTokens and GeneratedTokens")
    parser.add_argument("--ranks", type=int, default=2, help="(2)")
    parser.add_argument("--num-prompts", type=int, default=104, help="sequences of a workload (104)")
    parser.add_argument("--input-tokens", type=int, default=3328, help="of all prompts together (3328)")
    parser.add_argument("--output-tokens", type=int, default=2080, help="of all outputs together (2080)")
    parser.add_argument("--boundary-tokens", type=int, default=64, help="decode steps from boundary to boundary (64)")
    parser.add_argument("--page-size", type=int, default=64, help="tokens of a page (64)")
    parser.add_argument("--rounds", type=int, default=3, help="(3)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, their order, and what is drawn (0)")
    parser.add_argument("--timeout-s", type=float, default=1200.0, help="limit of one run, start included (1200)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="for record and logs (benchmark/out/ranks-DATE-TIME)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the record goes (DIR/record.json)")
    return parser.parse_args(argv)


def build(options: argparse.Namespace, variant: Path) -> list[Comparison]:
    """Return the comparisons of the options; write the variant of the checkpoint if needed. Raises ConfigError."""
    if options.ranks < 2:
        raise ConfigError(f"--ranks is {options.ranks}; what is measured takes at least 2")
    if options.rounds < 1:
        raise ConfigError(f"--rounds is {options.rounds}; it must be at least 1")
    wanted = options.workload or ["tail", "uneven", *(["trace"] if options.trace else []), "skewed"]
    if "trace" in wanted and options.trace is None:
        raise ConfigError("--workload trace is asked for without --trace FILE")
    config = model_config(options.model)
    budget = Budget(
        num_prompts=options.num_prompts,
        input_tokens=options.input_tokens,
        output_tokens=options.output_tokens,
        vocabulary=config["vocab_size"],
        seed=options.seed,
    )
    found = []
    for name in dict.fromkeys(wanted):
        if name == "skewed":
            workload, cases = budget.even(), _skewed_cases(options, config, variant)
        else:
            workload = _unlike(name, budget, options)
            cases = kinds_of_ranks(options.ranks, _settings(options), options.model.resolve())
        check_fits(workload, config)
        found.append(Comparison(name=name, workload=workload, cases=cases))
    return found


def _unlike(name: str, budget: Budget, options: argparse.Namespace) -> Workload:
    """Return the workload `name`, in which some sequences are longer than others."""
    if name == "trace":
        return budget.trace(options.trace)
    return budget.tail() if name == "tail" else budget.uneven(options.ranks)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {"boundary_tokens": options.boundary_tokens, "page_size": options.page_size, "max_total_tokens": 1 << 16}


def _skewed_cases(options: argparse.Namespace, config: dict[str, Any], variant: Path) -> list[Case]:
    """Return the cases: the checkpoint, the variant, and one rank with the variant. Nothing migrates: all are equal."""
    make_skewed(options.model.resolve(), variant, num_hot=max(2, config["num_experts_per_tok"] // 2 * 2))
    _, even, *_ = kinds_of_ranks(options.ranks, _settings(options), options.model.resolve())
    _, skewed, single, _ = kinds_of_ranks(options.ranks, _settings(options), variant)
    named = (("routing as it is", even), ("skewed routing", skewed), ("skewed, one rank", single))
    return [
        Case(name=name, model=case.model, engine=case.engine, num_ranks=case.num_ranks, cores=case.cores)
        for name, case in named
    ]


def measure(options: argparse.Namespace, argv: list[str]) -> int:
    """Run the sub-command, print the tables, write the record; return the exit code."""
    started = datetime.now().astimezone()
    out = (options.out or ROOT / "benchmark" / "out" / f"ranks-{started:%Y%m%d-%H%M%S}").resolve()
    source, code = machine.source(ROOT), 0
    # Report on SIGTERM as after Ctrl-C: the engine's process is in its own session and would stay behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="skewed-checkpoint-") as variant:
        comparisons = build(options, Path(variant))
        out.mkdir(parents=True, exist_ok=True)
        say(f"logs in {out}")
        try:
            run_all(comparisons, options.rounds, out, options.timeout_s, say)
        except KeyboardInterrupt:
            say("interrupted; reporting the rounds that are finished")
            code = 130
        except EngineError as error:
            say(str(error))
            code = 2
    here = machine.hardware()
    changed = f" with {source['changed_files']} changed files" if source["changed_files"] else ""
    commit = (source["commit"] or "no git commit")[:12]
    head = [
        f"{options.ranks} ranks, pages of {options.page_size}, boundaries every {options.boundary_tokens} steps; "
        f"{options.model.resolve().name}. {machine.describe(here)}.",
        f"{started:%Y-%m-%d}, {commit}{changed}: `python benchmark/ranks.py {shlex.join(argv)}`",
    ]
    text = "\n\n".join([*head, *(markdown(comparison) for comparison in comparisons), NOTE]) + "\n"
    record = {"machine": here, "source": source, "argv": argv, "workloads": [as_json(one) for one in comparisons]}
    (options.json or out / "record.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (out / "report.md").write_text(text, encoding="utf-8")
    print(text, end="")
    return code


def main(argv: list[str]) -> int:
    """Run the command. User errors end it with one line instead of a traceback."""
    if argv[:1] == [_LONG_TAIL]:
        return long_tail.command.main(argv[1:])
    options = parse(argv)
    return exit_code("ranks.py", lambda: measure(options, argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
