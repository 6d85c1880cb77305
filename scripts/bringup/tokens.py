"""Owns the comparison of greedy tokens with a reference, up to near ties. Pure; it makes no tokens.

Two implementations round differently, so where the best logits of a step nearly tie either token may be chosen, and
all that follows differs. A sequence agrees if it has the reference's tokens up to such a step. There, the token must be
one of the reference's best, with a log probability (as the reference has it) at most `near_tie` below the best one's.
At temperature 0 a gap of log probabilities is the gap of the logits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# Neighbouring bfloat16 logits below 32 are 0.125 apart, and each may be off by one step.
NEAR_TIE = 0.25
BEST = 5  # tokens of each step whose log probabilities a reference keeps

Step = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Reference:
    """Greedy tokens, and for each step the best tokens with their log probabilities, the best first."""

    tokens: list[list[int]]
    best: list[list[Step]]

    @classmethod
    def read(cls, path: Path) -> Reference:
        """Read a reference. Raises OSError or ValueError if there is no complete one."""
        kept = json.loads(path.read_text(encoding="utf-8"))
        best = [[[(int(token), float(log)) for token, log in step] for step in steps] for steps in kept["best"]]
        return cls(kept["tokens"], best)

    def write(self, path: Path) -> None:
        """Write the reference completely or not at all."""
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(json.dumps(asdict(self)), encoding="utf-8")
        partial.replace(path)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))


@dataclass(frozen=True, slots=True)
class Agreement:
    """The agreement of tokens with a reference. `ties`: the gap at each step from which a sequence may differ.

    `equal`: tokens before any difference. `differences`: what cannot be explained by a near tie.
    """

    equal: int
    total: int
    ties: list[float]
    differences: list[str]

    @property
    def holds(self) -> bool:
        """Whether no difference is unexplained, and at least half of the tokens come before any near tie."""
        return not self.differences and 2 * self.equal >= self.total

    @property
    def why_not(self) -> str:
        """Return why the tokens do not agree."""
        if self.differences:
            return f"tokens differ: {self.differences[0]} ({len(self.differences)} such sequences)"
        return f"only {self.equal} of {self.total} tokens come before a near tie: too few to tell anything"

    def text(self) -> str:
        """Return the table's text."""
        ties = f", {len(self.ties)} near ties (gap {max(self.ties):.2f})" if self.ties else ""
        return f"{self.equal} of {self.total}{ties}"


def compare(tokens: Sequence[Sequence[int]], reference: Reference, near_tie: float = NEAR_TIE) -> Agreement:
    """Compare a run's sequences with the reference's, in the same order."""
    assert len(tokens) == len(reference.tokens), f"{len(tokens)} sequences and {len(reference.tokens)} of the reference"
    equal, ties, differences = 0, list[float](), list[str]()
    for number, (found, wanted, best) in enumerate(zip(tokens, reference.tokens, reference.best, strict=True)):
        if len(found) != len(wanted):
            differences.append(f"sequence {number} has {len(found)} tokens instead of {len(wanted)}")
            continue
        split = next((at for at, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b), None)
        equal += len(wanted) if split is None else split
        if split is None:
            continue
        gap = _gap(found[split], best[split])
        if gap is not None and gap <= near_tie:
            ties.append(gap)
            continue
        by = f"whose logit is {gap:.2f} lower" if gap is not None else f"which is not among the {BEST} best"
        differences.append(
            f"sequence {number} has token {found[split]} at {split} instead of {wanted[split]}, {by} (near tie: "
            f"{near_tie})"
        )
    return Agreement(equal, reference.num_tokens, ties, differences)


def _gap(token: int, step: Step) -> float | None:
    """Return how far a token's log probability is below the best; None if it is not among the best."""
    return next((step[0][1] - log for one, log in step if one == token), None)
