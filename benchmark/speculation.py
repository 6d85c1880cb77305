#!/usr/bin/env python
"""Owns the measurement of drafts in decode steps (--speculate): few sequences, with drafts and without, alternating."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from sgl_batch import Engine
from sgl_batch.errors import ConfigError

DESCRIPTION = """\
Measure output tokens per second (prefill included) of a few sequences in one engine, with each of the values of
--speculate in turn. All must give the same tokens. Each question of a GSM8K file is one sequence's prompt, behind N
worked examples of the file.
"""
EPILOG = """\
example:
  python benchmark/speculation.py --model models/qwen3moe-1b --questions test.jsonl --sequences 1 --tokens 256
"""


def prompts(path: Path, *, count: int, shots: int) -> list[str]:
    """Return prompts of the questions of a GSM8K file, behind its first `shots` questions with answers."""
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; name a JSONL of GSM8K questions and answers")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[: shots + count]]
    worked = "".join(f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in rows[:shots])
    return [f"{worked}Question: {row['question']}\nAnswer:" for row in rows[shots:]]


def measure(engine: Any, texts: list[str], sampling: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens of one run, how many came in a second, prefill included, and what was counted meanwhile."""
    before = engine.batch_stats()["counters"]
    begun = time.perf_counter()
    answers = engine.generate(texts, [{**sampling, "sampling_seed": index} for index in range(len(texts))])
    seconds = time.perf_counter() - begun
    after = engine.batch_stats()["counters"]
    tokens = [answer["output_ids"] for answer in answers]
    counts = {name: after.get(name, 0) - before.get(name, 0) for name in ("decode_groups", "drafts", "drafts_accepted")}
    return {"tokens": tokens, "rate": sum(map(len, tokens)) / seconds, **counts}


def main(argv: list[str]) -> int:
    """Measure, and print a row for each value."""
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--shots", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--values", default="off,auto,4", help="values of --speculate")
    args = parser.parse_args(argv)
    texts = prompts(args.questions, count=args.sequences, shots=args.shots)
    sampling = {"temperature": args.temperature, "max_new_tokens": args.tokens, "ignore_eos": True}
    values = args.values.split(",")
    engine: Any = Engine(model_path=args.model, dtype=args.dtype, max_total_tokens=16384, share_prefixes=False)
    runs: dict[str, list[dict[str, Any]]] = {value: [] for value in values}
    try:
        measure(engine, texts, {**sampling, "max_new_tokens": 16})
        for number in range(args.rounds):
            for value in values if number % 2 == 0 else values[::-1]:
                engine.set_plan(speculate=value)
                runs[value].append(measure(engine, texts, sampling))
    finally:
        engine.shutdown()
    tokens = runs[values[0]][0]["tokens"]
    assert all(run["tokens"] == tokens for of_value in runs.values() for run in of_value), "drafts changed tokens"
    base = statistics.median(run["rate"] for run in runs[values[0]])
    print(f"{args.sequences} sequences, {sum(map(len, tokens))} tokens, {args.rounds} rounds, the same tokens in all")
    for value, of_value in runs.items():
        rates = sorted(run["rate"] for run in of_value)
        last = of_value[-1]
        print(
            f"  {value:>6}  {statistics.median(rates):8.2f} tokens/s ({rates[0]:.2f} to {rates[-1]:.2f})  "
            f"{statistics.median(rates) / base:5.2f}x  {last['decode_groups']} passes, "
            f"{last['drafts_accepted']} of {last['drafts']} drafts right"
        )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as error:
        sys.exit(str(error))
