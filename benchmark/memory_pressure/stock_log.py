"""Owns reading from stock SGLang's log what it computed again and how many ran; it counts nothing of that itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from statistics import fmean

_RETRACTED = re.compile(r"Retract requests\. #retracted_reqs: (\d+)")
_PREFILLED = re.compile(r"Prefill batch.*?#new-token: (\d+)")

_RUNNING = re.compile(r"Decode batch.*?#running-req: (\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retractions:
    """`sequences` were retracted, some more than once; of their KV, that of `tokens` at least was computed again."""

    sequences: int
    tokens: int


def read_retractions(log: str, *, prompt_tokens: int) -> Retractions:
    """What a run did of which this is the log, of level info.

    `prompt_tokens`: of all prompts that it was given. What was prefilled beyond these are prompts and outputs of
    retracted sequences, and of each the last token, which had no KV before. Where the radix cache had the beginning of
    a prompt, that many more were computed again.
    """
    sequences = sum(map(int, _RETRACTED.findall(log)))
    prefilled = sum(map(int, _PREFILLED.findall(log)))
    return Retractions(sequences=sequences, tokens=max(0, prefilled - prompt_tokens - sequences))


def read_running(log: str) -> float | None:
    """Mean of the sequences that decode together, as the log says now and then; None where it says nothing."""
    said = [int(number) for number in _RUNNING.findall(log)]
    return fmean(said) if said else None
