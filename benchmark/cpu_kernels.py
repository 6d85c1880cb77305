#!/usr/bin/env python
"""Owns the command that measures the native CPU kernels against this machine's ceilings and torch's operators.

Ceilings are measured in every round, on the same threads, each by the fastest way found: a large product of bf16, a
large read, and for decode a read of pages by a program that does nothing else. Beside them stands what two cores take
to hand a cache line to each other. Weights and pages are too many for the caches, as in a model. Timed is the operator
alone.

(Not `kernels.py`: transformers takes whatever module of that name it finds beside a script for a package of its own.)
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from comparison import machine
from comparison.terminal import say
from kernel_rates.shapes import Shapes, shapes_of

from sgl_batch.errors import ConfigError
from sgl_batch.sglang_adapter.child_processes import THREAD_ENVIRONMENT

ROOT = Path(__file__).resolve().parent.parent
TABLES = ("experts", "linear", "attention", "tokens")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="take the shapes of this checkpoint with experts (the 1.0e9 one's)")
    parser.add_argument("--only", choices=TABLES, nargs="+", default=list(TABLES), help="what to measure (all)")
    parser.add_argument("--tokens-per-expert", type=int, nargs="+", default=[1 << power for power in range(11)])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 256, 2048], help="rows of the linear layers")
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512, 2048], help="tokens of a sequence")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 256], help="sequences of a decode step")
    parser.add_argument("--vocabulary", type=int, metavar="N", help="tokens to choose from (the model's)")
    parser.add_argument("--layers", type=int, default=4, help="layers of experts that calls go through in turn (4)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sample-s", type=float, default=0.05, help="seconds that a sample takes at least (0.05)")
    parser.add_argument("--threads", type=int, help="(torch's own number)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures and times to this file")
    options = parser.parse_args(argv)
    numbers = [*options.tokens_per_expert, *options.rows, *options.contexts, *options.batches]
    numbers += [options.layers, options.rounds, options.threads, options.vocabulary]
    if min(number for number in numbers if number is not None) < 1:
        raise ConfigError("a number below 1 is given; sizes, layers, rounds, threads and the vocabulary are at least 1")
    return options


def all_work(kernels: Any, options: argparse.Namespace, shapes: Shapes) -> Iterator[Any]:
    """Measure the ceilings, then the requested kernels."""
    from kernel_rates import attention_work, product_work, token_work

    yield from product_work.ceilings(kernels)
    if "experts" in options.only:
        yield from product_work.expert_work(kernels, shapes, options.tokens_per_expert, options.layers)
    if "linear" in options.only:
        yield from product_work.linear_work(kernels, shapes, options.rows)
    if "attention" in options.only:
        yield from attention_work.attention_work(kernels, shapes, options.contexts, options.batches)
    if "tokens" in options.only:
        yield from token_work.token_work(kernels, options.vocabulary or shapes.vocabulary, options.batches)


def main(argv: list[str]) -> int:
    options = parse(argv)
    shapes = shapes_of(options.model)
    # The engine sets the same for its own processes, before torch loads OpenMP.
    os.environ |= {name: value for name, value in THREAD_ENVIRONMENT.items() if name not in os.environ}
    import torch
    from kernel_rates import report, work

    from sgl_batch.kernel_loader import native_kernels
    from sgl_batch.memory.kept_memory import keep_freed_memory

    keep_freed_memory()  # as the engine does
    kernels = native_kernels()
    if kernels is None:
        raise ConfigError("the native kernels are not installed: scripts/install builds them")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    say(f"{shapes}")
    timed = work.measure(
        list(all_work(kernels, options, shapes)), rounds=options.rounds, sample_s=options.sample_s, say=say
    )
    ceilings = report.ceilings_of(timed)
    rates = report.rates_of(timed, ceilings)
    about = {
        "machine": machine.hardware(),
        "source": machine.source(ROOT),
        "torch": torch.__version__,
        "isa": kernels.isa(),
        "threads": torch.get_num_threads(),
        "command": ["python", "benchmark/cpu_kernels.py", *argv],
    }
    print_report(about, rates, report.LIMITS, report.ceilings_text(rates, ceilings), report.work_text)
    if options.json is not None:
        figures = {**about, **report.as_json(rates, timed, ceilings)}
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


def print_report(
    about: dict[str, Any], rates: list[Any], limits: Sequence[str], head: str, text_of: Callable[[str, list[Any]], str]
) -> None:
    """Print the tables, but for those of the limits, after `head` and a line with the machine and the command."""
    print(f"{machine.describe(about['machine'])}; {about['threads']} threads; {about['isa']}; torch {about['torch']}")
    print(f"{' '.join(about['command'])}\n\nMedians (smallest-largest) of {rates[0].ms.count} rounds.\n\n{head}")
    for name in dict.fromkeys(rate.table for rate in rates if rate.table not in limits):
        print(f"\n{text_of(name, rates)}")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as error:
        sys.exit(f"cpu_kernels.py: {error}")
