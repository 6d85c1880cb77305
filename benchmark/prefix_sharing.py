#!/usr/bin/env python
"""Owns the measurement of prefix sharing: GSM8K questions that all begin with the same worked examples.

It makes the requests; engines are run and compared by offline.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import offline

from sgl_batch.errors import ConfigError

ENGINES = "sgl_batch,sgl_batch_no_sharing,stock"
DESCRIPTION = """\
Measure questions of GSM8K behind N worked examples, which are the same for all of them, through sgl_batch, through
sgl_batch with --no-share-prefixes, and through stock SGLang with its radix cache. The data is not shipped: train.jsonl
and test.jsonl come from github.com/openai/grade-school-math (grade_school_math/data).
"""
EPILOG = """\
Other arguments go to offline.py: --dtype, --rounds, --engines, --engine-arg, --out, ...

example:
  python benchmark/prefix_sharing.py --train train.jsonl --test test.jsonl --model models/qwen3moe-1b --num-prompts 256
"""


def examples(path: Path, most: int) -> Iterator[tuple[str, str]]:
    """Read the questions and answers of a GSM8K file. Raises ConfigError if it is none."""
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; name a JSONL of GSM8K questions and answers")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(itertools.islice(lines, most), 1):
            try:
                row = json.loads(line)
                yield row["question"], row["answer"]
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f'{path}, line {number} is no {{"question": ..., "answer": ...}}') from error


def prompts(train: Path, test: Path, *, shots: int, num_prompts: int) -> list[str]:
    """Return the questions of `test`, each after the first `shots` worked examples of `train`."""
    worked = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in examples(train, shots))
    return [f"{worked}Question: {question}\nAnswer:" for question, _ in examples(test, num_prompts)]


def main(argv: list[str]) -> int:
    """Write the requests and measure them with offline.py."""
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # --out is offline.py's
    )
    parser.add_argument("--train", type=Path, required=True, help="GSM8K file with the worked examples")
    parser.add_argument("--test", type=Path, required=True, help="GSM8K file with the questions")
    parser.add_argument("--shots", type=int, default=8, help="worked examples before each question (8)")
    parser.add_argument("--num-prompts", type=int, default=128, help="questions (128)")
    parser.add_argument("--output-len", type=int, default=32, help="tokens to generate (32)")
    args, rest = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        requests = Path(directory) / f"gsm8k-{args.shots}-shot.jsonl"
        try:
            texts = prompts(args.train, args.test, shots=args.shots, num_prompts=args.num_prompts)
        except ConfigError as error:
            print(f"prefix_sharing.py: {error}", file=sys.stderr)
            return 1
        requests.write_text("".join(json.dumps({"body": {"prompt": text}}) + "\n" for text in texts), encoding="utf-8")
        engines = [] if any(text.startswith("--engines") for text in rest) else ["--engines", ENGINES]
        wanted = ["--jsonl", str(requests), "--output-len", str(args.output_len)]
        return offline.main([*wanted, *engines, *rest])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
