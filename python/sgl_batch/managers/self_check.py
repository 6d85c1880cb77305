"""Runs the self-check of decode: a few steps in each mode, within a budget of time, and the choice from the cache.

What is chosen from the measurements is core/decode_choice's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from sgl_batch.core.decode_choice import DecodeChoice, Failed, Measured, Outcome, TimeUp, choose
from sgl_batch.managers.choice_cache import ChoiceCache, ChoiceKey

logger = logging.getLogger(__name__)

BUDGET_S = 20.0
_ROUNDS = 3


class Steps(Protocol):
    """Decode steps of a loaded engine that may be run in any mode, before it has any sequence."""

    def run_steps(self, mode: str, time_is_up: Callable[[], bool]) -> Measured:
        """Run the same few steps in this mode. Raises TimeUp between two steps, and what the mode's code raises."""
        ...


def settle(
    modes: Sequence[str],
    steps: Steps,
    *,
    deterministic: bool,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.monotonic,
) -> DecodeChoice:
    """Measure all modes, in rounds, so that what disturbs one disturbs all; each counts by its fastest round.

    A mode whose first round has not ended when `budget_s` are over is not measured.
    """
    if deterministic or len(modes) == 1:
        return choose(modes, {}, deterministic=deterministic)
    end_s, outcomes = clock() + budget_s, dict[str, Outcome]()
    try:
        for _ in range(_ROUNDS):
            for mode in modes:
                if not isinstance(outcomes.get(mode), Failed):
                    now = _run(steps, mode, lambda: clock() >= end_s)
                    outcomes[mode] = _merged(outcomes.get(mode), now)
    except TimeUp:
        logger.debug("the self-check of decode took all of its %g s", budget_s)
    return choose(modes, outcomes)


def settle_once(
    cache: ChoiceCache, key: ChoiceKey, modes: Sequence[str], measure: Callable[[], DecodeChoice]
) -> DecodeChoice:
    """The choice that was kept for this key, or a new one, which is kept."""
    found = cache.find(key)
    if found is not None and found.mode in modes:
        return DecodeChoice(mode=found.mode, why=f"{found.why} (measured at an earlier start)", seconds=found.seconds)
    choice = measure()
    if choice.seconds:
        cache.keep(key, choice)
    return choice


def _run(steps: Steps, mode: str, time_is_up: Callable[[], bool]) -> Outcome:
    try:
        return steps.run_steps(mode, time_is_up)
    except TimeUp:
        raise
    except Exception as error:
        logger.debug("decode steps failed in the mode %s", mode, exc_info=True)
        why = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['without a word'])[0]}"
        logger.warning("decode groups are not computed in the mode %r, which failed in the self-check: %s", mode, why)
        return Failed(why=why)


def _merged(before: Outcome | None, now: Outcome) -> Outcome:
    """One that fails at any time has failed; tokens are those of the first round."""
    if not isinstance(before, Measured) or not isinstance(now, Measured):
        return now
    seconds = tuple(min(pair) for pair in zip(before.seconds, now.seconds, strict=True))
    return Measured(seconds=seconds, tokens=before.tokens, margins=before.margins)
