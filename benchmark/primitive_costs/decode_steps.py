"""Measures a real engine's decode step, with dummy weights, and its time between passes.

Prompts of a batch share all but their last tokens, so that the beginning is computed once. Attention then reads the
same KV for all of them, from caches more often than it otherwise would: steps are rather too short than too long.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_OWN_TOKENS = 4
_BETWEEN = ("other", "sampling")


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The decode steps of a batch at one context. `step_s`: seconds of a step, by round.

    `between_s`: of it outside a pass, with the sampling of tokens and what belongs to the prompts' prefill.
    """

    context: int
    batch: int
    step_s: tuple[float, ...]
    between_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)


def measure(
    model: Path,
    found: list[Steps],
    *,
    batch: int,
    contexts: list[int],
    steps: int,
    rounds: int,
    vocabulary: int,
    arguments: dict[str, Any],
    say: Callable[[str], None],
) -> None:
    """Run one engine over every context, and add the results to `found`. Raises EngineError if it does not start."""
    import sgl_batch

    engine = sgl_batch.Engine(
        model_path=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        b_moe_decode=batch,
        b_moe_prefill=max(8192, max(contexts)),
        ready_ahead=0.0,
        **arguments,
    )
    try:
        draw = random.Random(0)
        _answer(engine, _prompts(draw, batch, min(contexts), vocabulary), 2)
        for context in contexts:
            found.append(_steps(engine, draw, batch, context, steps, rounds, vocabulary))
            say(f"decode step, context {context:,}: {1e3 * found[-1].median_s:.1f} ms")
    finally:
        engine.shutdown()


def _prompts(draw: random.Random, batch: int, context: int, vocabulary: int) -> list[list[int]]:
    shared = [draw.randrange(vocabulary) for _ in range(max(0, context - _OWN_TOKENS))]
    return [shared + [draw.randrange(vocabulary) for _ in range(min(_OWN_TOKENS, context))] for _ in range(batch)]


def _answer(engine: Any, prompts: list[list[int]], output_len: int) -> tuple[float, dict[str, float], dict[str, int]]:
    """Return the seconds for all answers, and the engine's counts: seconds by part, and counters."""
    before = engine.batch_stats()
    begun = time.perf_counter()
    sampling = {"temperature": 0, "max_new_tokens": output_len, "ignore_eos": True}
    engine.generate(input_ids=prompts, sampling_params=sampling)
    seconds, after = time.perf_counter() - begun, engine.batch_stats()
    parts = {name: after["part_s"][name] - value for name, value in before["part_s"].items()}
    counters = {name: value - before["counters"].get(name, 0) for name, value in after["counters"].items()}
    return seconds, parts, counters


def _steps(
    engine: Any, draw: random.Random, batch: int, context: int, steps: int, rounds: int, vocabulary: int
) -> Steps:
    """Return the engine's time by step without prefill, for answers of several tokens.

    On a GPU the host does not wait for a pass: there the time of the first token alone is taken off.
    """
    step_s, between_s = [], []
    for _ in range(rounds):
        whole_s, parts, counters = _answer(engine, _prompts(draw, batch, context, vocabulary), 1 + steps)
        if engine.server_args.device == "cpu":
            decode_s = sum(parts.values()) - parts["idle"] - counters["prefill_us"] / 1e6
        else:
            decode_s = whole_s - _answer(engine, _prompts(draw, batch, context, vocabulary), 1)[0]
        step_s.append(decode_s / counters["decode_steps"])
        between_s.append(sum(parts[name] for name in _BETWEEN) / counters["decode_steps"])
    return Steps(context=context, batch=batch, step_s=tuple(step_s), between_s=tuple(between_s))
