"""Owns the self-checks of a start: they run a few steps in each mode, within a budget of time, or use the cache.

core/decode_choice and core/expert_runner_choice choose from the measurements.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from sgl_batch.core.decode_choice import Failed, Measured, Outcome, TimeUp, choose
from sgl_batch.core.start_choices import Choice, taken_over
from sgl_batch.model_executor.time_budget import TimeBudget
from sgl_batch.startup.choice_cache import ChoiceCache, ChoiceKey

logger = logging.getLogger(__name__)

_ROUNDS = 3

TimeIsUp = Callable[[], bool]
T = TypeVar("T")


class Steps(Protocol):
    """Decode steps of a loaded engine without sequences, in any mode."""

    def run_steps(self, mode: str, time_is_up: TimeIsUp) -> Measured:
        """Run the same few steps in this mode. Raises TimeUp between two steps, and errors of the mode's code."""
        ...


def settle(modes: Sequence[str], steps: Steps, budget: TimeBudget, *, deterministic: bool) -> Choice:
    """Choose the mode of decode groups. One mode alone is not measured, nor is one without a whole first round."""
    if deterministic or len(modes) == 1:
        return choose(modes, {}, deterministic=deterministic)
    with budget.spending() as time_is_up:
        outcomes: dict[str, Outcome] = measure(
            modes, steps.run_steps, _merged, time_is_up, failed="decode groups are not computed in the mode"
        )
    return choose(modes, outcomes)


def measure(
    names: Sequence[str],
    run: Callable[[str, TimeIsUp], T],
    merge: Callable[[T, T], T],
    time_is_up: TimeIsUp,
    *,
    failed: str,
) -> dict[str, T | Failed]:
    """Run all names in rounds, so that a disturbance affects all of them; return their outcomes.

    `merge` combines the outcome so far with that of a new round. `failed`: the begin of the log line for a name that
    raises, which then has failed for good. A name whose first round has not ended when the time is up has no outcome.
    """
    outcomes: dict[str, T | Failed] = {}
    try:
        for _ in range(_ROUNDS):
            for name in names:
                before = outcomes.get(name)
                if not isinstance(before, Failed):
                    now = _run(run, name, time_is_up, failed)
                    outcomes[name] = now if before is None or isinstance(now, Failed) else merge(before, now)
    except TimeUp:
        logger.debug("the self-check took all of its time")
    return outcomes


def settle_once(
    cache: ChoiceCache, key: ChoiceKey, allowed: Callable[[str], bool], measured: Callable[[], Choice]
) -> Choice:
    """Return the cached choice of this key where its mode is allowed; otherwise a new one, which is cached."""
    found = cache.find(key)
    if found is not None and allowed(found.mode):
        return taken_over(found)
    choice = measured()
    if choice.numbers:
        cache.keep(key, choice)
    return choice


def _run(run: Callable[[str, TimeIsUp], T], name: str, time_is_up: TimeIsUp, failed: str) -> T | Failed:
    try:
        return run(name, time_is_up)
    except TimeUp:
        raise
    except Exception as error:
        logger.debug("the self-check of %s failed", name, exc_info=True)
        why = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
        logger.warning("%s %r, which failed in the self-check: %s", failed, name, why)
        return Failed(why=why)


def _merged(before: Measured, now: Measured) -> Measured:
    """Return the fastest time of each size, and the tokens of the first round."""
    seconds = tuple(min(pair) for pair in zip(before.seconds, now.seconds, strict=True))
    host = tuple(min(pair) for pair in zip(before.host_seconds, now.host_seconds, strict=True))
    return Measured(seconds=seconds, tokens=before.tokens, margins=before.margins, host_seconds=host)
