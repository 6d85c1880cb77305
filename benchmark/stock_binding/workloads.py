"""Owns the batches: those of equal lengths, which costs are fitted to, and those that are simulated."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from comparison.trace_lengths import trace_lengths

from stock_binding.engines import Lengths


@dataclass(frozen=True, slots=True)
class Equal:
    """Sequences of equal lengths that begin and end together, so many times one after the other."""

    lengths: Lengths
    times: int = 1


CALIBRATION: tuple[Equal, ...] = (
    Equal([(16, 1)], 16),
    Equal([(64, 1)] * 2, 12),
    Equal([(64, 1)] * 32),
    Equal([(256, 1)] * 16),
    Equal([(1024, 1)] * 4),
    Equal([(16, 96)]),
    Equal([(16, 96)] * 4),
    Equal([(64, 96)] * 16),
    Equal([(512, 48)] * 4),
    Equal([(512, 48)] * 16),
)

_COUNT, _PROMPT, _MEAN, _LONGEST = 64, 64, 48, 640
# Of the batches in which stock SGLang retracts sequences.
_LONG_COUNT, _SHORT_PROMPT = 32, 16
# By what lengths of the trace are divided, so that a CPU answers them in seconds.
_TRACE_PART = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences by the engines that they are dealt to by turns. `scarce`: with little memory for KV."""

    name: str
    lengths: Lengths
    engines: int = 1
    scarce: bool = False


def batches(trace: Path | None) -> list[Batch]:
    """Return the batches. The first three, and the first with scarce memory, have the same numbers of tokens."""
    draw = random.Random(5)
    equal = [_MEAN] * _COUNT
    uniform = _with_sum([draw.uniform(1, 2 * _MEAN - 1) for _ in equal], sum(equal))
    tail = _with_sum([min(draw.paretovariate(1.1), 40.0) for _ in equal], sum(equal))
    both = tail + uniform
    draw.shuffle(both)
    found = [
        Batch(name="equal outputs", lengths=_of(equal)),
        Batch(name="uniform outputs", lengths=_of(uniform)),
        Batch(name="outputs with a long tail", lengths=_of(tail)),
        Batch(name="uniform outputs, scarce memory", lengths=_of(uniform), scarce=True),
        *_retracted(),
        Batch(name="two engines, equal outputs", lengths=_of(equal * 2), engines=2),
        Batch(name="two engines, even shares", lengths=_of(_paired(both)), engines=2),
        Batch(name="two engines, uneven shares", lengths=_of(_lopsided(both)), engines=2),
    ]
    if trace is not None:
        found.insert(3, Batch(name="Azure trace", lengths=_first_of(trace, _COUNT)))
    return found


def _retracted() -> list[Batch]:
    """Return batches of outputs so long that admission, which expects a share of them, takes in more than fit."""
    draw = random.Random(2)
    long = [(_SHORT_PROMPT, draw.randint(100, 400)) for _ in range(_LONG_COUNT)]
    draw = random.Random(2)
    tail = [(_SHORT_PROMPT, int(min(60 * draw.paretovariate(1.1), 600))) for _ in range(_LONG_COUNT)]
    draw = random.Random(2)
    both = [(draw.randint(16, 200), draw.randint(20, 300)) for _ in range(_LONG_COUNT)]
    return [
        Batch(name="long outputs, scarce memory", lengths=long, scarce=True),
        Batch(name="long tail of outputs, scarce memory", lengths=tail, scarce=True),
        Batch(name="prompts and outputs that differ, scarce memory", lengths=both, scarce=True),
    ]


def _of(outputs: Sequence[int]) -> Lengths:
    return [(_PROMPT, output) for output in outputs]


def _with_sum(values: Sequence[float], total: int) -> list[int]:
    """Return whole numbers from 1 to _LONGEST in proportion to the values, that add up to a total."""
    factor = total / sum(values)
    found = [min(max(1, int(value * factor)), _LONGEST) for value in values]
    short = total - sum(found)
    for index in range(abs(short)):
        place = index % len(found)
        found[place] = max(1, found[place] + (1 if short > 0 else -1))
    return found


def _paired(outputs: Sequence[int]) -> list[int]:
    """Return the outputs in an order in which dealing by turns to two engines gives both as many tokens, nearly."""
    rest = sorted(outputs, reverse=True)
    shares: tuple[list[int], list[int]] = ([], [])
    for output in rest:
        least = min((share for share in shares if len(share) < len(rest) / 2), key=sum)
        least.append(output)
    draw = random.Random(6)
    for share in shares:
        draw.shuffle(share)
    return [output for pair in zip(*shares, strict=True) for output in pair]


def _lopsided(outputs: Sequence[int]) -> list[int]:
    """Return the outputs in an order in which the first of two engines gets three of four of the longer half."""
    longer = sorted(outputs)[len(outputs) // 2 :]
    shorter = sorted(outputs)[: len(outputs) // 2]
    shares = [longer[index] for index in range(len(longer)) if index % 4] + shorter[::4]
    others = longer[::4] + [shorter[index] for index in range(len(shorter)) if index % 4]
    draw = random.Random(7)
    for share in (shares, others):
        draw.shuffle(share)
    return [output for pair in zip(shares, others, strict=True) for output in pair]


def _first_of(trace: Path, count: int) -> Lengths:
    rows = trace_lengths(trace)[:count]
    return [(max(1, prompt // _TRACE_PART), max(1, output // _TRACE_PART)) for prompt, output in rows]
