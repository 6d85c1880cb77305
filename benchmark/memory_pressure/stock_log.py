"""Owns reading stock SGLang's log: recomputed tokens and running requests, which it does not count itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from statistics import fmean

RETRACTED = re.compile(r"Retract requests\. #retracted_reqs: (\d+)")
PREFILLED = re.compile(r"Prefill batch.*?#new-token: (\d+)")
RUNNING = re.compile(r"Decode batch.*?#running-req: (\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retractions:
    """`sequences` counts retractions; the KV of at least `tokens` tokens was computed again."""

    sequences: int
    tokens: int


def read_retractions(log: str, *, prompt_tokens: int) -> Retractions:
    """Read a run's retractions from its log of level info.

    `prompt_tokens`: of all prompts that it was given. What was prefilled beyond these are prompts and outputs of
    retracted sequences, and of each the last token, which had no KV before. Where the radix cache had the beginning of
    a prompt, that many more were computed again.
    """
    sequences = sum(map(int, RETRACTED.findall(log)))
    prefilled = sum(map(int, PREFILLED.findall(log)))
    return Retractions(sequences=sequences, tokens=max(0, prefilled - prompt_tokens - sequences))


def read_running(log: str) -> float | None:
    """Return the mean number of decoding sequences in the log's samples; None if it has none."""
    said = [int(number) for number in RUNNING.findall(log)]
    return fmean(said) if said else None
