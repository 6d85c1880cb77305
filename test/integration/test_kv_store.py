"""A device for a few sequences and a store for the others: the same tokens, nothing computed twice, nothing lost."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sgl_batch import Engine

from .conftest import FAMILIES

pytestmark = pytest.mark.engine

PAGE = 8
POOL_PAGES = 20
PROMPT_LENGTHS = (1, 3, 7, 8, 9, 16, 23, 40, 64)
OUTPUT_LENGTHS = (1, 2, 8, 9, 24, 40, 70)
SMALL = {"page_size": PAGE, "boundary_tokens": PAGE, "b_moe_decode": 16, "b_moe_prefill": 700, "b_attn_prefill": 64}
LAYERS = 4  # of all three models


@dataclass(frozen=True)
class Requests:
    """Prompts of random tokens, and parameters with an output length for each; every third is sampled by a seed."""

    input_ids: list[list[int]]
    sampling_params: list[dict[str, Any]]


@pytest.fixture(scope="module")
def requests() -> Requests:
    rng = random.Random(0)
    ids, parameters = [], []
    for index in range(150):
        ids.append([rng.randrange(5, 3000) for _ in range(rng.choice(PROMPT_LENGTHS))])
        sampling = {"temperature": 0} if index % 3 else {"temperature": 1.0, "sampling_seed": index}
        parameters.append({**sampling, "max_new_tokens": rng.choice(OUTPUT_LENGTHS), "ignore_eos": True})
    return Requests(ids, parameters)


def answers(engine: Any, requests: Requests) -> list[list[int]]:
    results = engine.generate(input_ids=requests.input_ids, sampling_params=requests.sampling_params)
    return [result["output_ids"] for result in results]


def store_in(directory: Path | None) -> dict[str, Any]:
    """A store in memory, or in a file."""
    place = {} if directory is None else {"kv_store_dir": str(directory)}
    return {"kv_store_bytes": 64 << 20, "kv_store_checksums": True, "kv_copy_threads": 2, **place}


@pytest.fixture
def started() -> Iterator[Callable[..., Any]]:
    """Starts engines that end with the test."""
    engines: list[Any] = []

    def start(**kwargs: Any) -> Any:
        engines.append(Engine(**kwargs))
        return engines[-1]

    yield start
    for engine in engines:
        engine.shutdown()


@pytest.mark.parametrize(("family", "in_file"), [(FAMILIES[0], False), (FAMILIES[1], False), (FAMILIES[2], True)])
def test_tokens_are_the_same_where_every_sequence_waits_in_the_store(
    family: str,
    in_file: bool,
    tmp_path: Path,
    requests: Requests,
    model_path: Callable[[str], str],
    batch_engine: Callable[..., Any],
    started: Callable[..., Any],
) -> None:
    roomy = batch_engine(family, **SMALL)
    before = roomy.batch_stats()["counters"].get("expert_rows", 0)
    expected = answers(roomy, requests)
    expert_rows = roomy.batch_stats()["counters"]["expert_rows"] - before
    store = store_in(tmp_path if in_file else None)
    engine = started(
        model_path=model_path(family), dtype="float32", max_total_tokens=PAGE * POOL_PAGES, **store, **SMALL
    )
    assert answers(engine, requests) == expected
    stats = engine.batch_stats()
    counters = stats["counters"]
    assert stats["total_pages"] == stats["free_pages"] == POOL_PAGES
    assert stats["store"]["free_pages"] == stats["store"]["total_pages"] == (64 << 20) // stats["store"]["page_bytes"]
    assert counters["suspensions"] > 5
    assert counters["pages_copied_to_suspend"] <= counters["suspensions"], "at most the open page is copied"
    assert counters["expert_rows"] == expert_rows, "no row is computed twice"
    assert (counters["recomputed_tokens_planned"], counters["recomputed_tokens_unplanned"]) == (0, 0)
    layer_bytes = stats["store"]["page_bytes"] / LAYERS
    assert counters["staging_peak_pages"] >= 4 * POOL_PAGES, "a prefill group is four times the device's pages"
    assert counters["staging_peak_bytes"] <= 2 * layer_bytes * counters["staging_peak_pages"], "and two layers of it"


def test_an_aborted_sequence_gives_back_its_pages_and_slots(
    model_path: Callable[[str], str], started: Callable[..., Any], requests: Requests
) -> None:
    engine = started(
        model_path=model_path(FAMILIES[0]),
        dtype="float32",
        max_total_tokens=PAGE * POOL_PAGES,
        **store_in(None),
        **SMALL,
    )
    expected = answers(engine, requests)

    async def abort_in_the_middle() -> list[str]:
        long = {"temperature": 0, "max_new_tokens": 80, "ignore_eos": True}
        streams = [
            await engine.async_generate(input_ids=ids, sampling_params=long, stream=True)
            for ids in requests.input_ids[:60]
        ]
        reasons = await asyncio.gather(*(ending(stream) for stream in streams))
        return [reason["type"] for reason in reasons]

    async def ending(stream: Any) -> dict[str, Any]:
        async for chunk in stream:
            if chunk["meta_info"]["completion_tokens"] >= 20:
                engine.tokenizer_manager.abort_request(abort_all=True)
        reason: dict[str, Any] = chunk["meta_info"]["finish_reason"]
        return reason

    assert "abort" in engine.loop.run_until_complete(abort_in_the_middle())
    stats = engine.batch_stats()
    assert stats["free_pages"] == stats["total_pages"] == POOL_PAGES
    assert stats["store"]["free_pages"] == stats["store"]["total_pages"]
    assert answers(engine, requests) == expected


def test_a_sequence_that_can_never_fit_the_store_is_refused_with_the_numbers(
    model_path: Callable[[str], str], started: Callable[..., Any]
) -> None:
    engine = started(
        model_path=model_path(FAMILIES[0]), dtype="float32", max_total_tokens=4096, kv_store_bytes=1 << 20, **SMALL
    )
    with pytest.raises(ValueError, match=r"313 pages of 8 tokens, but the host KV store holds 64; .* --kv-store-bytes"):
        engine.generate(input_ids=[5] * 2000, sampling_params={"temperature": 0, "max_new_tokens": 500})
    assert engine.generate(input_ids=[5] * 20, sampling_params={"max_new_tokens": 3})["meta_info"]["completion_tokens"]


@pytest.mark.parametrize("prompt_tokens", [1, 8, 9, 30])
def test_choices_in_the_store_compute_their_prompt_once(
    prompt_tokens: int,
    model_path: Callable[[str], str],
    batch_engine: Callable[..., Any],
    shelf: Any,
) -> None:
    prompts = [[7 + index] * prompt_tokens for index in range(12)]
    sampling = {"n": 4, "temperature": 1.0, "sampling_seed": 3, "max_new_tokens": 20, "ignore_eos": True}
    expected = [
        answer["output_ids"]
        for answer in batch_engine(FAMILIES[0], **SMALL).generate(input_ids=prompts, sampling_params=sampling)
    ]
    engine = shelf.get(
        Engine,
        model_path=model_path(FAMILIES[0]),
        dtype="float32",
        max_total_tokens=PAGE * POOL_PAGES,
        **store_in(None),
        **SMALL,
    )
    before = Counter(engine.batch_stats()["counters"])
    answered = engine.generate(input_ids=prompts, sampling_params=sampling)
    assert [answer["output_ids"] for answer in answered] == expected
    stats = engine.batch_stats()
    counted = Counter(stats["counters"])
    counted.subtract(before)
    assert counted["prompt_tokens"] == 12 * (prompt_tokens + 3), "one row more for each choice"
    assert (counted["recomputed_tokens_planned"], counted["recomputed_tokens_unplanned"]) == (12 * 3, 0)
    assert stats["store"]["free_pages"] == stats["store"]["total_pages"]
    assert stats["free_pages"] == POOL_PAGES
