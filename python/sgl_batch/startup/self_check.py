"""Runs the self-checks of a start: a few steps each way, within a budget of time, and the choice from the cache.

What is chosen from the measurements is core/decode_choice's and core/expert_runner_choice's.
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
    """Decode steps of a loaded engine that may be run in any mode, before it has any sequence."""

    def run_steps(self, mode: str, time_is_up: TimeIsUp) -> Measured:
        """Run the same few steps in this mode. Raises TimeUp between two steps, and what the mode's code raises."""
        ...


def settle(modes: Sequence[str], steps: Steps, budget: TimeBudget, *, deterministic: bool) -> Choice:
    """The mode of decode groups, of which there may be one. A mode without a whole first round is not measured."""
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
    """Run all in rounds, so that what disturbs one disturbs all. One that fails at any time has failed.

    `merge`: what was found so far with what a new round has found. `failed`: what follows for one, as a log's line
    begins. One whose first round has not ended when the time is up has no outcome.
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
    """The choice that was kept for this key, where its mode is allowed, or a new one, which is kept."""
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
        why = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['without a word'])[0]}"
        logger.warning("%s %r, which failed in the self-check: %s", failed, name, why)
        return Failed(why=why)


def _merged(before: Measured, now: Measured) -> Measured:
    """The fastest of each size counts; tokens are those of the first round."""
    seconds = tuple(min(pair) for pair in zip(before.seconds, now.seconds, strict=True))
    host = tuple(min(pair) for pair in zip(before.host_seconds, now.host_seconds, strict=True))
    return Measured(seconds=seconds, tokens=before.tokens, margins=before.margins, host_seconds=host)
