"""Owns prompts that begin alike, for engines with small pages, and counting the tokens that they share."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

PAGE = 8
# Tokens that a prompt takes from a base, and its own tokens after them: no page is shared, some, all but one token.
COMMON_LENGTHS = (0, 5, 8, 9, 16, 24, 33, 41, 48, 60)
OWN_LENGTHS = (0, 1, 3, 8, 20)
OUTPUT_LENGTHS = (1, 2, 8, 9, 24, 40, 70)


@dataclass(frozen=True)
class Requests:
    """Prompts, and the sampling parameters and output length of each; every third is sampled with a seed."""

    input_ids: list[list[int]]
    sampling_params: list[dict[str, Any]]


def prompts_that_begin_alike(
    count: int, rng: random.Random, output_lengths: Sequence[int] = OUTPUT_LENGTHS
) -> Requests:
    """Return prompts that begin with a random number of tokens of one of three bases."""
    bases = [[rng.randrange(5, 3000) for _ in range(max(COMMON_LENGTHS))] for _ in range(3)]
    ids, parameters = [], []
    for index in range(count):
        common = rng.choice(bases)[: rng.choice(COMMON_LENGTHS)]
        ids.append([*common, *(rng.randrange(5, 3000) for _ in range(rng.choice(OWN_LENGTHS)))] or [5])
        sampling = {"temperature": 0} if index % 3 else {"temperature": 1.0, "sampling_seed": index}
        parameters.append({**sampling, "max_new_tokens": rng.choice(output_lengths), "ignore_eos": True})
    return Requests(ids, parameters)


def answers(engine: Any, requests: Requests) -> list[list[int]]:
    """Return the tokens of each output."""
    results = engine.generate(input_ids=requests.input_ids, sampling_params=requests.sampling_params)
    return [result["output_ids"] for result in results]


def counted(engine: Any, work: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """Return the result of `work`, and what the engine counted meanwhile."""
    before = engine.batch_stats()["counters"]
    result = work()
    after = engine.batch_stats()["counters"]
    return result, {name: after[name] - before.get(name, 0) for name in after}


def rows_of_one_group(prompts: list[list[int]]) -> int:
    """Return the number of prompt tokens to compute when prompts come one after the other and all stay alive."""
    known: set[tuple[int, ...]] = set()
    rows = 0
    for prompt in prompts:
        prefixes = [tuple(prompt[:end]) for end in range(PAGE, len(prompt) + 1, PAGE)]
        found = sum(prefix in known for prefix in prefixes if len(prefix) < len(prompt))
        rows += len(prompt) - found * PAGE
        known.update(prefixes)
    return rows


def check_mixed(
    engine: Any, requests: Requests, expected: list[list[int]], tokens: int = 2 * PAGE, share: float = 1 / 20
) -> None:
    """Check that prompts computed in decode steps, `tokens` in a step, give `expected`, and nothing is computed twice.

    At least `share` of the prompts' tokens must be computed in decode steps. The engine mixes from now on. All its
    pages are free before and after.
    """
    few = {"b_moe_prefill": 2 * tokens, "b_attn_prefill": 20, "b_moe_decode": 4, "b_attn_decode": 3, "ready_ahead": 0.0}
    engine.set_plan(mix_prefill=tokens, **few)
    first = Requests(requests.input_ids[:30], requests.sampling_params[:30])
    given, counts = counted(engine, lambda: answers(engine, first))
    assert given == expected[:30]
    assert counts.get("prompt_tokens_mixed", 0) >= share * counts["prompt_tokens"]
    assert counts["prefill_rows"] == counts["prompt_tokens"]
    assert counts["recomputed_tokens_unplanned"] == 0
    stats = engine.batch_stats()
    assert stats["free_pages"] == stats["total_pages"]
    if stats["store"]:
        assert stats["store"]["free_pages"] == stats["store"]["total_pages"]
