"""Decides which forward pass computes decode groups, from the measured time and tokens of each.

The steps are run and timed, and the choice is kept, in startup/.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sgl_batch.core.start_choices import WINS_BY, Choice

# Values of --decode-forward. The first two are resolved to a mode at the start; the others are modes.
AUTO, MEASURE = "auto", "measure"
# `default`: SGLang's own forward for a group that one of its CUDA graphs serves, the coroutine forward for any other.
# `eager`: the coroutine forward without the CUDA graphs that it may have.
DEFAULT, COROUTINE, EAGER, SGLANG = "default", "coroutine", "eager", "sglang"
MODES = (DEFAULT, COROUTINE, EAGER, SGLANG)

# Suffix of a mode's name in the numbers of a choice: the host's part of a step.
_LAUNCHED = ", until the host has launched it"
# The two best logits nearly tie if they differ by less than this share of the best one: bfloat16 keeps 8 bits of each
# of many sums.
NEAR_TIE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measured decode steps of one mode. All modes run the same steps: the same sequences with the same input tokens.

    seconds: time of one step by size of group, the largest group first.
    tokens: the likeliest token of each row of each step, in the same order for all modes.
    margins: by how much each token's logit exceeds the second best, as a share of its size; empty if not known.
    host_seconds: the part of each step until the host has launched all of it; empty if not known.
    """

    seconds: tuple[float, ...]
    tokens: tuple[int, ...]
    margins: tuple[float, ...] = ()
    host_seconds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A mode that could not be measured."""

    why: str


Outcome = Measured | Failed


class TimeUp(Exception):  # noqa: N818 (a name that says what has happened)
    """Raised when the time for measurements ends while a mode is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeForms:
    """The forward passes that an engine has for its decode groups.

    has_adapter: whether it has the coroutine forward.
    sglang_graph: whether it has one of SGLang's CUDA graphs for the largest group.
    own_graph: whether it has CUDA graphs of the coroutine forward.
    obstacle: why SGLang's own forward cannot compute the groups; None if it can.
    """

    has_adapter: bool
    sglang_graph: bool = False
    own_graph: bool = False
    obstacle: str | None = None


def candidates(forms: DecodeForms) -> tuple[str, ...]:
    """Return the modes that compute the largest group in different ways; the first is used without a measurement."""
    if not forms.has_adapter:
        return (DEFAULT,)
    own = (EAGER,) if forms.own_graph else ()
    if forms.sglang_graph:
        return (DEFAULT, COROUTINE, *own)
    return (DEFAULT, *own) if forms.obstacle is not None else (DEFAULT, *own, SGLANG)


def refusal(mode: str, forms: DecodeForms) -> str | None:
    """Return why an engine's decode groups cannot be computed in a requested mode, or None if they can."""
    if mode == SGLANG:
        return forms.obstacle
    if mode in (COROUTINE, EAGER) and not forms.has_adapter:
        return "this model has no family adapter"
    return None


def choose(modes: Sequence[str], outcomes: Mapping[str, Outcome], *, deterministic: bool = False) -> Choice:
    """Return the mode to use.

    The first mode stays unless another mode gives the same tokens, up to near ties, and takes at most 1 / 1.05 of the
    first one's time with the largest group and at most 1.05 of it with the others.

    `modes`: as `candidates` returns them. A mode without an outcome was not measured.
    """
    default = modes[0]
    if deterministic:
        return Choice(mode=default, why=f"{default}: the deterministic mode never switches by time")
    if len(modes) == 1:
        return Choice(mode=default, why=f"{default}: no other forward pass can compute this engine's groups")
    measured = {name: found for name in modes if isinstance(found := outcomes.get(name), Measured)}
    seconds = {name: found.seconds for name, found in measured.items()}
    if not seconds:
        return Choice(mode=default, why=f"{default}: nothing could be measured ({_failures(modes, outcomes)})")
    reference = next(iter(seconds))
    why_not = {name: _why_not(outcomes.get(name), outcomes[reference], reference) for name in modes}
    winners = [name for name, why in why_not.items() if why is None]
    mode = min(winners, key=lambda name: seconds[name][0], default=reference)
    others = "; ".join(f"{name} {why}" for name, why in why_not.items() if name not in (mode, reference) and why)
    host = {name + _LAUNCHED: found.host_seconds for name, found in measured.items() if found.host_seconds}
    return Choice(mode=mode, why=_sentence(mode, reference, seconds, others), numbers={**seconds, **host})


def step_of(choice: Choice) -> tuple[float | None, float | None]:
    """Return the seconds of a largest group's step in the chosen mode, and the host's part; None if not measured."""
    step, host = (choice.numbers.get(name) for name in (choice.mode, choice.mode + _LAUNCHED))
    return step[0] if step else None, host[0] if host else None


def _sentence(mode: str, reference: str, seconds: Mapping[str, Sequence[float]], others: str) -> str:
    said = f"{mode}: {_ms(seconds[mode][0])} a decode step"
    if mode != reference:
        ratio = seconds[reference][0] / seconds[mode][0]
        said += f", {ratio:.2f} times as fast as {reference} ({_ms(seconds[reference][0])}), with the same tokens"
    return f"{said}; {others}" if others else said


def _why_not(outcome: Outcome | None, reference: Outcome, name: str) -> str | None:
    """Return why a mode does not replace the reference, or None if it is faster."""
    assert isinstance(reference, Measured), "the reference was measured"
    if outcome is None:
        return "was not measured: the time was up"
    if isinstance(outcome, Failed):
        return f"failed: {outcome.why}"
    differing = _differing(outcome, reference)
    if differing:
        return f"gave {differing} other tokens than {name}"
    first, *rest = zip(outcome.seconds, reference.seconds, strict=True)
    if first[0] * WINS_BY > first[1]:
        return f"takes {_ms(first[0])}, which is not 5 % less"
    slower = [pair for pair in rest if pair[0] > pair[1] * WINS_BY]
    if slower:
        return f"takes {_ms(slower[0][0])} with a small group, and {name} {_ms(slower[0][1])}"
    return None


def _differing(outcome: Measured, reference: Measured) -> int:
    """Return how many tokens differ where the reference's best logits do not nearly tie."""
    margins = reference.margins or (1.0,) * len(reference.tokens)
    rows = zip(outcome.tokens, reference.tokens, margins, strict=True)
    return sum(token != wanted and margin > NEAR_TIE for token, wanted, margin in rows)


def _failures(modes: Sequence[str], outcomes: Mapping[str, Outcome]) -> str:
    failed = {name: found.why for name in modes if isinstance(found := outcomes.get(name), Failed)}
    return "; ".join(f"{name}: {why}" for name, why in failed.items()) or "the time was up"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
