"""Owns what stock SGLang's messages say of a batch: its passes, their tokens and rows, and what it retracted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from memory_pressure.stock_log import PREFILLED, RETRACTED, RUNNING


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
    prefills, rows = PREFILLED.findall(messages), [int(found) for found in RUNNING.findall(messages)]
    retracted = sum(map(int, RETRACTED.findall(messages)))
    return Counts(
        prefill_passes=len(prefills),
        decode_steps=len(rows),
        decoded_rows=sum(rows),
        retracted=retracted,
        again=sum(map(int, prefills)) - prompt_tokens - retracted,
    )
