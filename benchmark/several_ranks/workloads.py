"""Owns the workloads for ranks: the lengths of prompts and outputs."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from comparison.trace_lengths import trace_lengths
from comparison.workload import Workload

from sgl_batch.errors import ConfigError

_FIRST_RANDOM_ID = 100
# In medians of the body: the distribution's start, its median, and its 95th percentile.
_SHORTEST, _P95 = 0.3, 2.5
# Of the tail: the 99th percentile and the longest, in 95th percentiles.
_P99, _LONGEST = 3.8, 9.0
# The fewest sequences of which the 99th percentile is not the longest.
FEWEST = 100


def quantile_index(quantile: float, count: int) -> int:
    """Return the index of a quantile among `count` sorted values (nearest rank)."""
    return math.ceil(quantile * count) - 1


def tail_lengths(count: int, total: int) -> list[int]:
    """Return sorted lengths with a sum of about `total`: P99 is 3.8 x P95, the longest 9 x P95. Raises ConfigError."""
    if count < FEWEST:
        raise ConfigError(f"--num-prompts is {count}; a tail with a 99th percentile of its own takes at least {FEWEST}")
    points = [(0, _SHORTEST), (quantile_index(0.5, count), 1.0), (quantile_index(0.95, count), _P95)]
    points += [(quantile_index(0.99, count), _P95 * _P99), (count - 1, _P95 * _LONGEST)]
    lengths = [_between(points, index) for index in range(count)]
    p95 = max(1, round(_P95 * total / sum(lengths)))
    return [max(1, round(length * p95 / _P95)) for length in lengths]


def _between(points: Sequence[tuple[int, float]], index: int) -> float:
    """Return the value at `index` on the lines between points."""
    upper = next(number for number in range(1, len(points)) if index <= points[number][0])
    (low_index, low), (high_index, high) = points[upper - 1], points[upper]
    return low + (high - low) * (index - low_index) / (high_index - low_index)


def scaled(lengths: Sequence[int], total: int) -> list[int]:
    """Scale the lengths by one factor so that they add up to about `total`; each is at least 1."""
    factor = total / max(1, sum(lengths))
    return [max(1, round(length * factor)) for length in lengths]


class Budget:
    """The size of one workload: the number of sequences, and the tokens of all prompts and of all outputs."""

    def __init__(self, *, num_prompts: int, input_tokens: int, output_tokens: int, vocabulary: int, seed: int) -> None:
        named = (("--input-tokens", input_tokens), ("--output-tokens", output_tokens))
        if num_prompts < 1:
            raise ConfigError(f"--num-prompts is {num_prompts}; it must be at least 1")
        for flag, value in named:
            if value < num_prompts:
                raise ConfigError(f"{flag} is {value}; {num_prompts} sequences take at least a token each")
        self.num_prompts, self.input_tokens, self.output_tokens = num_prompts, input_tokens, output_tokens
        self._vocabulary, self._seed = vocabulary, seed

    def tail(self) -> Workload:
        """Prompts of one length, outputs with the made-up tail, in random order."""
        output_lens = tail_lengths(self.num_prompts, self.output_tokens)
        random.Random(self._seed).shuffle(output_lens)
        return self._workload(self._even(self.input_tokens), output_lens)

    def uneven(self, num_ranks: int) -> Workload:
        """Order lengths so that ranks that take turns get them by length: rank 0 gets all the longest."""
        longest_first = tail_lengths(self.num_prompts, self.output_tokens)[::-1]
        size = -(-self.num_prompts // num_ranks)
        by_rank = [longest_first[rank * size : (rank + 1) * size] for rank in range(num_ranks)]
        turns = zip_longest(*by_rank)
        output_lens = [length for turn in turns for length in turn if length is not None]
        return self._workload(self._even(self.input_tokens), output_lens)

    def trace(self, path: Path) -> Workload:
        """Prompts and outputs of requests drawn from a trace, each scaled to its budget."""
        known = trace_lengths(path)
        if len(known) < self.num_prompts:
            raise ConfigError(f"--trace {path} has {len(known)} requests and --num-prompts is {self.num_prompts}")
        drawn = random.Random(self._seed).sample(known, self.num_prompts)
        return self._workload(
            scaled([prompt for prompt, _ in drawn], self.input_tokens),
            scaled([output for _, output in drawn], self.output_tokens),
        )

    def even(self) -> Workload:
        """Sequences that are all alike, so that nothing but routing makes ranks wait."""
        return self._workload(self._even(self.input_tokens), self._even(self.output_tokens))

    def _even(self, total: int) -> list[int]:
        return [max(1, round(total / self.num_prompts))] * self.num_prompts

    def _workload(self, input_lens: list[int], output_lens: list[int]) -> Workload:
        draw = random.Random(self._seed)
        first = _FIRST_RANDOM_ID if self._vocabulary > 2 * _FIRST_RANDOM_ID else 0
        prompts = [[draw.randrange(first, self._vocabulary) for _ in range(length)] for length in input_lens]
        lengths = f"prompt tokens: {_described(input_lens)}; output tokens: {_described(output_lens)}"
        return Workload(
            prompts=prompts,
            output_lens=output_lens,
            description=f"{len(prompts)} sequences; {lengths} (seed {self._seed})",
        )


def _described(lengths: Sequence[int]) -> str:
    ordered = sorted(lengths)
    if ordered[0] == ordered[-1]:
        return f"{ordered[0]} each"
    p95, p99 = (ordered[quantile_index(quantile, len(ordered))] for quantile in (0.95, 0.99))
    middle = statistics.median_low(ordered)
    return f"median {middle}, P95 {p95}, P99 {p99}, longest {ordered[-1]}, together {sum(ordered):,}"
