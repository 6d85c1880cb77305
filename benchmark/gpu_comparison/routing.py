"""Owns the similarity of a run's sequences: distinct tokens and distinct experts of a decode step. Pure.

Sequences that meet the same tokens meet the same experts; a step then reads a few experts where a real one reads nearly
all. So no figure stands without these two counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

STEPS = 8
MOST_ROWS = 256
_REPLAYED_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Distinct:
    """Distinct experts of a layer that `rows` rows of one position choose: mean, and least of all steps and layers."""

    mean: float
    least: int
    rows: int


def steps_of(output_len: int) -> list[int]:
    """Return the examined output positions, spread evenly up to the last one that is fed back."""
    fed = max(1, output_len - 1)
    count = min(STEPS, fed)
    return [fed * (number + 1) // count - 1 for number in range(count)]


def replayed_rows(prompts: Sequence[Sequence[int]], output_len: int, num_cases: int) -> int:
    """Return how many sequences of each case are replayed for their routing, about a million tokens in total."""
    longest = max(map(len, prompts)) + output_len
    affordable = _REPLAYED_TOKENS // (longest * max(1, num_cases))
    return max(1, min(len(prompts), MOST_ROWS, affordable))


def distinct_tokens(outputs: Sequence[Sequence[int]]) -> float:
    """Return the mean share of distinct tokens among sequences at some output positions; 1 if all differ."""
    shares = []
    for step in steps_of(min(map(len, outputs))):
        met = [output[step] for output in outputs]
        shares.append(len(set(met)) / len(met))
    return fmean(shares)


def distinct_experts(choices_SRLK: Sequence[Sequence[Sequence[Sequence[int]]]], rows: int) -> Distinct:
    """Count by step and layer over every `rows` sequences, as many as a step has, or all if there are fewer.

    `choices_SRLK`: experts [K] that the row of a sequence [R] chose in a layer [L] at a step [S].
    """
    counts = []
    for rows_RLK in choices_SRLK:
        together = min(rows, len(rows_RLK))
        for first in range(0, len(rows_RLK) - together + 1, together):
            group = rows_RLK[first : first + together]
            for layer in range(len(group[0])):
                counts.append(len({expert for row_LK in group for expert in row_LK[layer]}))
    return Distinct(mean=fmean(counts), least=min(counts), rows=min(rows, len(choices_SRLK[0])))
