"""Owns the choices that the start of an engine makes, and decides those that follow from measured decode steps.

Those are overlap and the mode of decode KV. The forward pass of decode groups is chosen in decode_choice, the expert
runner in expert_runner_choice, the attention backend in startup/.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sgl_batch.errors import ConfigError

WINS_BY = 1.05  # a measured alternative replaces the default only if it is so many times as fast
ON, OFF = "on", "off"
# `PER_INTERVAL`: both modes are measured while the engine runs, for one interval between boundaries each.
RESIDENT, PER_INTERVAL = "resident", "auto"
_EARLIER = " (settled at an earlier start)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The mode of one option, and why, in a sentence. `numbers`: by name, in seconds unless the name says otherwise."""

    mode: str
    why: str
    numbers: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartChoices:
    """The choice of each option that a start decides."""

    decode_forward: Choice
    expert_runner: Choice
    attention: Choice
    overlap: Choice
    decode_kv: Choice

    def as_dict(self) -> dict[str, Any]:
        """Return by option its mode, why and numbers."""
        return asdict(self)


def line_of(choices: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the modes of `StartChoices.as_dict` in one line."""
    return ", ".join(f"{option.replace('_', ' ')} {choice['mode']}" for option, choice in choices.items())


def choice_of(found: Mapping[str, Any]) -> Choice:
    """Read a choice that `dataclasses.asdict` wrote. Raises ValueError, TypeError or LookupError for anything else."""
    numbers = {str(of): tuple(float(one) for one in values) for of, values in found["numbers"].items()}
    return Choice(mode=str(found["mode"]), why=str(found["why"]), numbers=numbers)


def earlier_choices(text: str | None) -> dict[str, Choice]:
    """Read the choices of an earlier start from JSON, an object by option. Raises ConfigError for anything else."""
    if text is None:
        return {}
    try:
        return {name: choice_of(found) for name, found in json.loads(text).items()}
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"start_choices does not hold the choices of an earlier start ({type(error).__name__}: {error}): leave it "
            "out, and they are measured"
        ) from error


def taken_over(choice: Choice) -> Choice:
    """Return a choice of an earlier start, marked as not made again."""
    why = choice.why.removesuffix(_EARLIER) + _EARLIER
    return Choice(mode=choice.mode, why=why, numbers=choice.numbers)


def choose_overlap(step_s: float | None, host_s: float | None, *, obstacle: str | None = None) -> Choice:
    """Choose whether results of a decode step are processed while the device computes the next one.

    Only the time that is left of a step when the host has launched it can hide the host's work on results. If that is
    under 5 % of a step, overlap cannot win 5 %. Otherwise it is on, as by default in SGLang: it changes no token, and
    costs one row of a step for each sequence that ends at a stop token.

    `step_s`: seconds of a decode step of the largest group. `host_s`: seconds of it until the host has launched it.
    Either is None if not measured. `obstacle`: why overlap is impossible; None if it is possible.
    """
    if obstacle is not None:
        return Choice(mode=OFF, why=f"off: {obstacle}")
    if step_s is None or host_s is None:
        return Choice(mode=OFF, why="off: no decode step was measured")
    numbers = {"step": (step_s,), "host": (host_s,)}
    free = 1 - host_s / step_s
    said = f"the host has launched a step of {_ms(step_s)} after {_ms(host_s)}"
    if free < 1 - 1 / WINS_BY:
        return Choice(mode=OFF, why=f"off: {said}, and the rest can hide less than 5 %", numbers=numbers)
    return Choice(mode=ON, why=f"on: {said}, and the rest can hide its work on results", numbers=numbers)


def choose_decode_kv(step_s: float, copied_bytes_per_s: float, pool_bytes: int) -> Choice:
    """Choose whether streamed decode steps can pay when not all sequences fit the device's KV pages.

    A streamed step copies the KV of its rows from the host; a resident step computes as many rows as the pages hold. So
    streaming can win 5 % only if 1.05 times the bytes of all pages are copied in the time of a resident step. The step
    was measured with short sequences. Longer ones add the time to read the pages at the device's own memory rate, which
    is tens of times that of copies.

    `step_s`: seconds of a resident step of the largest group. `pool_bytes`: bytes of all KV pages on the device.
    """
    numbers = {
        "step": (step_s,),
        "copied bytes per second": (copied_bytes_per_s,),
        "bytes of pages": (float(pool_bytes),),
    }
    share = step_s * copied_bytes_per_s / pool_bytes
    said = f"{copied_bytes_per_s / 1e9:.1f} GB/s from the host bring {share:.1%} of the device's pages in a step of"
    if share < WINS_BY:
        why = f"resident: {said} {_ms(step_s)}, and streaming pays only where they bring all"
        return Choice(mode=RESIDENT, why=why, numbers=numbers)
    return Choice(
        mode=PER_INTERVAL, why=f"auto: {said} {_ms(step_s)}: both are measured, an interval each", numbers=numbers
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
