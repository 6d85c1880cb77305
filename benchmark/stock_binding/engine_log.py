"""Owns what stock SGLang's messages say of a batch: its passes, their tokens and rows, and what it retracted."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields

_PREFILL = re.compile(r"Prefill batch, .*#new-token: (\d+), #cached-token: (\d+)")
_DECODE = re.compile(r"Decode batch, #running-req: (\d+)")
_RETRACT = re.compile(r"KV cache pool is full\. Retract requests\. #retracted_reqs: (\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What one or several engines did. `again`: tokens that were computed before, and whose KV was retracted."""

    prefill_passes: int
    decode_steps: int
    decoded_rows: int
    retracted: int
    again: int


def total(counts: Iterable[Counts]) -> Counts:
    """Return the sums."""
    every = list(counts)
    return Counts(**{one.name: sum(getattr(found, one.name) for found in every) for one in fields(Counts)})


def counts_of(messages: str, prompt_tokens: int) -> Counts:
    """Return what an engine did whose `--decode-log-interval` is 1, by its messages.

    `prompt_tokens`: of the batch. What prefill computes beyond them are tokens that were retracted. The last token of a
    retracted sequence is not counted: its KV was not computed before.
    """
    prefills, rows = _PREFILL.findall(messages), [int(found) for found in _DECODE.findall(messages)]
    retracted = sum(map(int, _RETRACT.findall(messages)))
    return Counts(
        prefill_passes=len(prefills),
        decode_steps=len(rows),
        decoded_rows=sum(rows),
        retracted=retracted,
        again=sum(int(new) for new, _ in prefills) - prompt_tokens - retracted,
    )
