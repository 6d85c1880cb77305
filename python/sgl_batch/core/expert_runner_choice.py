"""Decides which expert runner computes a call, by its number of tokens, from the measured time and output of each.

Runners are called and timed, and the choice is kept, in startup/.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sgl_batch.core.decode_choice import Failed
from sgl_batch.core.start_choices import WINS_BY, Choice

# By number type, the most by which outputs may differ from the reference's, as a share of its size (norms over the
# compared rows). A runner rounds a few times, each by at most half a unit in the last place: 2^-9 of a number in
# bfloat16, 2^-12 in float16. Matrix units round float32 factors to 11 bits.
TOLERANCES = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 3e-3}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerMeasured:
    """Measured calls of one runner; each tuple has one value for each number of tokens, ascending.

    seconds: time of a call; on a device with a clock of its own, as in a CUDA graph, the device's time alone.
    errors: distance of the output from the reference's, as a share of the reference's size.
    host_seconds: time of a call as the host sees calls in a row; empty if it is the same as `seconds`.
    """

    seconds: tuple[float, ...]
    errors: tuple[float, ...]
    host_seconds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerTable:
    """Runners, each with the number of tokens from which on it computes, ascending."""

    best: tuple[tuple[int, str], ...]

    def runner_for(self, num_tokens: int) -> str:
        """Return the runner of a call; the first one also computes calls with fewer tokens than its number."""
        found = self.best[0][1]
        for from_tokens, name in self.best:
            if num_tokens >= from_tokens:
                found = name
        return found

    @property
    def names(self) -> frozenset[str]:
        """The runners in the table."""
        return frozenset(name for _, name in self.best)

    def __str__(self) -> str:
        return ", ".join(f"{name} from {tokens} tokens" if tokens else name for tokens, name in self.best)

    @classmethod
    def parse(cls, text: str) -> RunnerTable:
        """Read the table from the text that `str` makes of it. Raises ValueError for another text."""
        best = []
        for part in text.split(", "):
            name, has_from, tokens = part.removesuffix(" tokens").partition(" from ")
            best.append((int(tokens) if has_from else 0, name))
        return cls(best=tuple(best))


def choose_runners(
    names: Sequence[str],
    tokens: Sequence[int],
    outcomes: Mapping[str, RunnerMeasured | Failed],
    *,
    dtype: str,
) -> Choice:
    """Return a choice whose mode is a table of runners, as text.

    For each number of tokens the first runner stays unless another one takes at most 1 / 1.05 of its time (as the host
    sees it at most 1.05), and gives the same outputs for all numbers within the tolerance of `dtype`. Between two
    numbers the nearer one by ratio decides. If the first runner was not measured, there is nothing to compare with, and
    it stays.

    `names`: runners, first the one that is used without a measurement. `tokens`: numbers of tokens of the measured
    calls, ascending.
    """
    measured = {name: found for name in names if isinstance(found := outcomes.get(name), RunnerMeasured)}
    seconds = {name: found.seconds for name, found in measured.items()}
    reference = names[0]
    if reference not in seconds:
        why = _why_not(outcomes.get(reference), TOLERANCES[dtype], reference)
        return Choice(mode=reference, why=f"{reference}: it {why}, and others are compared with it alone")
    why_not = {name: _why_not(outcomes.get(name), TOLERANCES[dtype], reference) for name in names if name != reference}
    usable = [name for name, why in why_not.items() if why is None]
    best: list[tuple[int, str]] = []
    for index, number in enumerate(tokens):
        winners = [name for name in usable if _wins(measured[name], measured[reference], index)]
        name = min(winners, key=lambda one: seconds[one][index], default=reference)
        if not best or best[-1][1] != name:
            best.append((round(math.sqrt(tokens[index - 1] * number)) if index else 0, name))
    table = str(RunnerTable(best=tuple(best)))
    said = "; ".join(f"{name} {', '.join(f'{1e3 * one:.3f}' for one in seconds[name])} ms" for name in seconds)
    others = "".join(f"; {name} {why}" for name, why in why_not.items() if why is not None)
    why = f"{table}: calls of {', '.join(map(str, tokens))} tokens take {said}{others}"
    host = {f"{name}, as the host sees it": found.host_seconds for name, found in measured.items()}
    seen = {name: values for name, values in host.items() if values}
    return Choice(mode=table, why=why, numbers={**seconds, **seen, "tokens": tuple(tokens)})


def _wins(found: RunnerMeasured, reference: RunnerMeasured, index: int) -> bool:
    if found.seconds[index] * WINS_BY > reference.seconds[index]:
        return False
    return not found.host_seconds or found.host_seconds[index] <= reference.host_seconds[index] * WINS_BY


def _why_not(outcome: RunnerMeasured | Failed | None, tolerance: float, reference: str) -> str | None:
    if outcome is None:
        return "was not measured: the time was up"
    if isinstance(outcome, Failed):
        return f"failed: {outcome.why}"
    # A NaN is within no tolerance.
    far = next((error for error in outcome.errors if not error <= tolerance), None)
    return None if far is None else f"differs from {reference} by {far:.1e}, more than {tolerance:.0e}"
