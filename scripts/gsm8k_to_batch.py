#!/usr/bin/env python3
"""Owns the conversion of GSM8K questions to OpenAI batch request lines."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path


def batch_lines(questions: Iterable[str], model: str, max_tokens: int) -> Iterator[dict[str, object]]:
    """Make one greedy chat completion request for each question, numbered from gsm8k-0001."""
    for number, question in enumerate(questions, 1):
        yield {
            "custom_id": f"gsm8k-{number:04d}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": model,
                "messages": [{"role": "user", "content": question}],
                "max_tokens": max_tokens,
                "temperature": 0,
            },
        }


def read_questions(path: Path) -> Iterator[str]:
    """Read the questions of a GSM8K JSONL; raise ValueError with the line's number if a line has none."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                question = json.loads(line)["question"]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(
                    f'{path}:{number}: expected {{"question": ..., "answer": ...}}, got {line.strip()[:60]!r}'
                ) from error
            yield str(question)


def positive(text: str) -> int:
    """Parse an argument that must be 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def main() -> int:
    """Read the arguments and write the file; return 0 if it is written, 1 if the input is wrong."""
    parser = argparse.ArgumentParser(description="Turn GSM8K (openai/grade-school-math) into batch requests.")
    parser.add_argument("input", type=Path, metavar="IN.jsonl", help='lines of {"question": ..., "answer": ...}')
    parser.add_argument("output", type=Path, metavar="OUT.jsonl", help="request lines for `sgl-batch run -i`")
    parser.add_argument(
        "--model",
        default="default",
        help="the name that the requests ask for; the engine's --served-model-name",
    )
    parser.add_argument("--max-tokens", type=positive, default=512, help="longest answer (default: %(default)s)")
    parser.add_argument("--limit", type=positive, help="only so many questions, from the start")
    arguments = parser.parse_args()
    try:
        questions = itertools.islice(read_questions(arguments.input), arguments.limit)
        # All lines are read before the file is opened: a wrong line leaves no incomplete output.
        lines = list(batch_lines(questions, arguments.model, arguments.max_tokens))
        with arguments.output.open("w", encoding="utf-8") as out:
            out.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    except (OSError, ValueError) as error:
        print(f"gsm8k_to_batch: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
