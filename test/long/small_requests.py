"""Owns the input of a long run, small request lines made from the GSM8K sample, and the check of its output.

It knows no engine and starts nothing.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

MAX_PROMPT_CHARACTERS = 120
_SENTENCE_END = re.compile(r"(?<=[.?!])\s+")


def sample_sentences(sample: Path) -> list[str]:
    """Return the sample's sentences of at most MAX_PROMPT_CHARACTERS, each once, in the sample's order."""
    lines = sample.read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line)["body"]["messages"][0]["content"] for line in lines]
    sentences = (sentence for question in questions for sentence in _SENTENCE_END.split(question.strip()))
    return list(dict.fromkeys(sentence for sentence in sentences if len(sentence) <= MAX_PROMPT_CHARACTERS))


def custom_id(index: int) -> str:
    """Return the name of the line at `index`, from 0."""
    return f"line-{index + 1:07d}"


def num_choices(index: int) -> int:
    """Return 2 for every tenth line, else 1."""
    return 2 if index % 10 == 5 else 1


def max_tokens(index: int) -> int:
    """Return 2, 3 and 4 by turns."""
    return 2 + index % 3


def request_line(index: int, sentences: list[str]) -> dict[str, Any]:
    """Return the request at `index`. No two have the same prompt; both endpoints and both kinds of sampling occur."""
    prompt = f"{index + 1}. {sentences[index % len(sentences)]}"
    completes = index % 4 == 3
    body: dict[str, Any] = {"model": "default", "max_tokens": max_tokens(index)}
    body |= {"prompt": prompt} if completes else {"messages": [{"role": "user", "content": prompt}]}
    body |= {"temperature": 0.8 * (index % 2), "n": num_choices(index)}
    if index % 8 == 6:
        body["logprobs"] = True
    url = "/v1/completions" if completes else "/v1/chat/completions"
    return {"custom_id": custom_id(index), "method": "POST", "url": url, "body": body}


def write_requests(path: Path, num_lines: int, sample: Path) -> None:
    """Write `num_lines` request lines; the same number always gives the same file."""
    sentences = sample_sentences(sample)
    with path.open("w", encoding="utf-8") as file:
        for index in range(num_lines):
            file.write(json.dumps(request_line(index, sentences)) + "\n")


def answers_fault(output: Path, num_lines: int) -> str | None:
    """Return the fault of an output file that must answer each line once, in the input's order; None if it has none."""
    num_read = 0
    with output.open(encoding="utf-8") as file:
        for index, line in enumerate(file):
            if index >= num_lines:
                return f"line {index + 1} of the output is one more than the {num_lines:,} of the input"
            fault = _line_fault(index, json.loads(line))
            if fault is not None:
                return f"line {index + 1} of the output {fault}"
            num_read += 1
    return None if num_read == num_lines else f"the output has {num_read:,} lines, the input {num_lines:,}"


def _line_fault(index: int, answer: dict[str, Any]) -> str | None:
    if answer["custom_id"] != custom_id(index):
        return f"answers {answer['custom_id']}; it must answer {custom_id(index)}"
    if answer["error"] is not None or answer["response"]["status_code"] != 200:
        return f"is no answer: {json.dumps(answer)[:300]}"
    body, choices, limit = answer["response"]["body"], num_choices(index), max_tokens(index)
    if len(body["choices"]) != choices:
        return f"has {len(body['choices'])} choices; {choices} were asked for"
    num_tokens = body["usage"]["completion_tokens"]
    if not choices <= num_tokens <= choices * limit:
        return f"has {num_tokens} tokens; {choices} choices of 1 to {limit} were asked for"
    return None
