#!/usr/bin/env python
"""Owns the command that measures what number types change in a model's answers on a CPU.

Each number type's engine computes the same texts, token by token, and greedy answers to the same questions. Compared
with the first one: the log probabilities of the texts' tokens, how often the likeliest next token is another, the mean
loss, and how many greedy tokens an answer has before the first that differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comparison import machine
from comparison.terminal import exit_code, say

from sgl_batch.errors import ConfigError

# The engine's arguments for each number type, and the ones that all share.
TYPES: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8 weights": {"dtype": "bfloat16", "cpu_weight_dtype": "int8"},
    "int8 weights and activations": {"dtype": "bfloat16", "cpu_weight_dtype": "int8", "cpu_activations": "int8"},
}
HEAD = """\
| number type | loss | mean error | largest error | same likeliest token | greedy tokens before a difference |
| --- | ---: | ---: | ---: | ---: | ---: |"""
SHARED = {"log_level": "error", "max_total_tokens": 65536}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """One number type's: log probabilities of the texts' tokens, the likeliest token at each place, greedy tokens."""

    log_probabilities: list[float]
    likeliest: list[int]
    greedy: list[list[int]]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, nargs="+", help="directories of checkpoints")
    parser.add_argument("--jsonl", type=Path, required=True, help="a file of lines with `question` and `answer`")
    parser.add_argument("--num-prompts", type=int, default=200, help="lines to take (200)")
    parser.add_argument("--output-len", type=int, default=32, help="greedy tokens of each answer (32)")
    return parser.parse_args(argv)


def texts_of(path: Path, count: int) -> list[tuple[str, str]]:
    """Return questions and answers. Raises ConfigError for a line without them."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:count]]
        return [(line["question"], line["answer"]) for line in lines]
    except (ValueError, KeyError) as error:
        raise ConfigError(f"--jsonl is {path}; a line has no question and answer: {error!r}") from error


def answers_of(model: Path, arguments: dict[str, Any], texts: list[tuple[str, str]], output_len: int) -> Answers:
    """Compute the texts and the greedy answers with an engine of its own."""
    from sgl_batch import Engine

    engine = Engine(model_path=str(model), **SHARED, **arguments)
    try:
        whole = engine.generate(
            [f"{question} {answer}" for question, answer in texts],
            {"temperature": 0, "max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=1,
        )
        asked = {"temperature": 0, "max_new_tokens": output_len, "ignore_eos": True}
        greedy = [answer["output_ids"] for answer in engine.generate([question for question, _ in texts], asked)]
    finally:
        engine.shutdown()
    # Nothing foretells the first token of a text.
    logs = [one for answer in whole for one, *_ in answer["meta_info"]["input_token_logprobs"][1:]]
    best = [tops[0][1] for answer in whole for tops in answer["meta_info"]["input_top_logprobs"][1:]]
    return Answers(log_probabilities=logs, likeliest=best, greedy=greedy)


def same_share(found: Sequence[int], expected: Sequence[int]) -> float:
    return sum(a == b for a, b in zip(found, expected, strict=True)) / len(expected)


def tokens_before_difference(found: list[list[int]], expected: list[list[int]]) -> float:
    """Return the share of greedy tokens that come before an answer's first different one."""
    same = 0
    for ours, theirs in zip(found, expected, strict=True):
        same += next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(theirs))
    return same / sum(map(len, expected))


def row(name: str, found: Answers, first: Answers) -> str:
    pairs = zip(found.log_probabilities, first.log_probabilities, strict=True)
    errors = [abs(ours - theirs) for ours, theirs in pairs]
    loss = -sum(found.log_probabilities) / len(found.log_probabilities)
    cells = [
        name,
        f"{loss:.4f}",
        f"{sum(errors) / len(errors):.4f}",
        f"{max(errors):.2f}",
        f"{100 * same_share(found.likeliest, first.likeliest):.1f} %",
        f"{100 * tokens_before_difference(found.greedy, first.greedy):.1f} %",
    ]
    return f"| {' | '.join(cells)} |"


def main(argv: list[str]) -> int:
    options = parse(argv)
    texts = texts_of(options.jsonl, options.num_prompts)
    print(f"{machine.describe(machine.hardware())}\n{' '.join(['python benchmark/number_types.py', *argv])}\n")
    for model in options.model:
        print(f"{model.name}, {len(texts)} texts:\n")
        print(HEAD)
        first: Answers | None = None
        for name, arguments in TYPES.items():
            say(f"{model.name}: {name}")
            found = answers_of(model, arguments, texts, options.output_len)
            first = first or found
            print(row(name, found, first), flush=True)
        print()
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("number_types.py", lambda: main(sys.argv[1:])))
