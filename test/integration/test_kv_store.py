"""With few sequences on the device and the others in a store, tokens are the same and nothing is computed twice."""

from __future__ import annotations

import asyncio
import heapq
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from sgl_batch import Engine

from .conftest import FAMILIES
from .shared_prompts import PAGE, Requests, answers, check_mixed, counted, prompts_that_begin_alike

pytestmark = pytest.mark.engine

POOL_PAGES = 20
SMALL = {"page_size": PAGE, "boundary_tokens": PAGE, "b_moe_decode": 16, "b_moe_prefill": 700, "b_attn_prefill": 64}
LAYERS = 4  # of all three models
EXPERT_LAYERS, TOP_K = {FAMILIES[0]: 4, FAMILIES[2]: 3}, 4


@pytest.fixture(scope="module")
def seed() -> int:
    """The seed of the requests: a new one each time, or that of a run that failed, from the environment."""
    return int(os.environ.get("SGL_BATCH_TEST_SEED") or random.SystemRandom().randrange(1 << 32))


@pytest.fixture(autouse=True)
def reported_seed(seed: int) -> None:
    """Print the seed, which pytest shows with a failure."""
    sys.stdout.write(f"the same requests again: SGL_BATCH_TEST_SEED={seed}\n")


@pytest.fixture(scope="module")
def requests(seed: int) -> Requests:
    return prompts_that_begin_alike(60, random.Random(seed))


def check_counts(counts: dict[str, int], unshared: dict[str, int], *, family: str, prompts: int) -> None:
    """Check that no row is computed twice: each prompt token is computed or shared, each generated one is a row."""
    assert unshared.get("prompt_tokens_shared", 0) == 0
    assert counts["prompt_tokens"] + counts["prompt_tokens_shared"] == unshared["prompt_tokens"]
    assert counts["prompt_tokens_shared"] > unshared["prompt_tokens"] / 3
    assert counts["prefill_rows"] == counts["prompt_tokens"]
    assert counts["decode_rows"] == unshared["decode_rows"]
    for count in (counts, unshared):
        rows = EXPERT_LAYERS[family] * (count["prefill_rows"] + count["decode_rows"])
        unread = count["prefill_rows"] - prompts  # of a prompt the last layer's experts compute the last token alone
        assert count["expert_rows"] == TOP_K * (rows - unread)


@pytest.fixture(scope="module")
def small_device(model_path: Callable[[str], str], engine_cache: Any) -> Callable[[], Any]:
    """Return a function that gives an engine of the first family with few device pages and a store in memory."""
    settings = {"dtype": "float32", "max_total_tokens": PAGE * POOL_PAGES, "decode_kv": "resident", **store_in(None)}
    return lambda: engine_cache.get(Engine, model_path=model_path(FAMILIES[0]), **settings, **SMALL)


def store_in(directory: Path | None) -> dict[str, Any]:
    """Return the flags of a store in memory, or in a file of a directory."""
    file = {} if directory is None else {"kv_store_dir": str(directory)}
    return {"kv_store_bytes": 64 << 20, "kv_store_checksums": True, "kv_copy_threads": 2, **file}


@pytest.mark.parametrize(("family", "in_file"), [(FAMILIES[0], False), (FAMILIES[2], True)])
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
    roomy.set_plan(share_prefixes=False)
    expected, unshared = counted(roomy, lambda: answers(roomy, requests))
    roomy.set_plan(share_prefixes=True)
    shared, on_device = counted(roomy, lambda: answers(roomy, requests))
    assert shared == expected
    checked = {"family": family, "prompts": len(requests.input_ids)}
    check_counts(on_device, unshared, **checked)
    store = store_in(tmp_path if in_file else None)
    device = {"model_path": model_path(family), "dtype": "float32", "max_total_tokens": PAGE * POOL_PAGES, **SMALL}
    engine = started(decode_kv="resident", **store, **device)
    assert answers(engine, requests) == expected
    stats = engine.batch_stats()
    counters = stats["counters"]
    check_counts(counters, unshared, **checked)
    assert counters["prefix_pages_restored"] > 0, "later groups found the prompts of earlier ones"
    assert stats["total_pages"] == stats["free_pages"] == POOL_PAGES
    assert stats["store"]["free_pages"] == stats["store"]["total_pages"] == (64 << 20) // stats["store"]["page_bytes"]
    assert counters["suspensions"] > 2
    assert counters["pages_copied_to_suspend"] <= counters["suspensions"], "at most the open page is copied"
    assert (counters["recomputed_tokens_planned"], counters["recomputed_tokens_unplanned"]) == (0, 0)
    layer_bytes = stats["store"]["page_bytes"] / LAYERS
    assert counters["staging_peak_pages"] > POOL_PAGES, "a prefill group is larger than the device"
    assert counters["staging_peak_bytes"] <= 2 * layer_bytes * counters["staging_peak_pages"], "at most two layers"
    assert not stats["store"]["exclusive"]
    # Each kind of store runs mixed steps with one of the families.
    if not in_file:
        check_mixed(engine, requests, expected)
    engine.shutdown()
    streamed = started(decode_kv="streamed", **store, **device)
    check_streamed(streamed, requests, expected, unshared, family)
    if in_file:
        check_mixed(streamed, requests, expected)
    streamed.shutdown()
    small = {**store, "kv_store_bytes": POOL_PAGES * stats["store"]["page_bytes"]}
    exclusive = started(**small, **device)
    check_exclusive(exclusive, requests, expected, unshared)
    if not in_file:
        # An exclusive store cuts no prompt; whether a whole one fits a decode step depends on the drawn lengths.
        check_mixed(exclusive, requests, expected, tokens=10 * PAGE, share=0)


def fewest_steps(lengths: Iterable[int], at_once: int) -> int:
    """Return how many steps sequences take if each begins, in their order, as soon as one of `at_once` has ended."""
    ends = [0] * at_once
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def check_streamed(
    engine: Any, requests: Requests, expected: list[list[int]], unshared: dict[str, int], family: str
) -> None:
    """Check that a decode group larger than the device, whose KV is streamed by layer, has the same tokens."""
    assert answers(engine, requests) == expected
    stats = engine.batch_stats()
    counters = stats["counters"]
    check_counts(counters, unshared, family=family, prompts=len(requests.input_ids))
    assert counters["streamed_steps"] == counters["decode_groups"]
    fewest_groups = fewest_steps([one["max_new_tokens"] - 1 for one in requests.sampling_params], SMALL["b_moe_decode"])
    # Some draws have a few long outputs left in the end, so that not even an engine without any waits fills its groups.
    most = counters["decode_rows"] / fewest_groups
    assert counters["decode_rows"] / counters["decode_groups"] > min(8, 0.75 * most), (
        "at most 16 run, of which two to six fit the device"
    )
    assert counters["attention_calls"] > LAYERS * (counters["decode_groups"] + counters["prefill_groups"]), (
        "groups were cut"
    )
    assert counters["pages_streamed"] > 0
    assert counters.get("suspensions", 0) == counters.get("pages_restored", 0) == 0
    assert counters["recomputed_tokens_unplanned"] == 0
    assert stats["free_pages"] == stats["total_pages"] == POOL_PAGES
    assert stats["store"]["free_pages"] == stats["store"]["total_pages"]


def check_exclusive(engine: Any, requests: Requests, expected: list[list[int]], unshared: dict[str, int]) -> None:
    """Check that a store as small as the device gives the same tokens; pages move, and none is in both."""
    # Where requests come one after the other, as on a busy machine, all may have room.
    for _ in range(5):
        made, counters = counted(engine, lambda: answers(engine, requests))
        assert made == expected
        if counters.get("suspensions", 0) > 0:
            break
    stats = engine.batch_stats()
    assert stats["store"]["exclusive"]
    assert counters["prompts_prefilled_on_device"] > 10
    assert stats["counters"]["staging_peak_pages"] > 0, "other prompts went to the store as they were computed"
    assert counters["suspensions"] > 0
    assert counters["pages_copied_to_suspend"] > 2 * counters["suspensions"], "whole sequences move"
    assert counters["pages_restored"] > counters["pages_copied_to_suspend"]
    assert counters["prompt_tokens"] == unshared["prompt_tokens"]
    assert counters["decode_rows"] == unshared["decode_rows"]
    assert counters["recomputed_tokens_unplanned"] == 0
    assert stats["free_pages"] == stats["total_pages"] == POOL_PAGES
    assert stats["store"]["free_pages"] == stats["store"]["total_pages"] == POOL_PAGES


def test_a_shared_prompt_is_on_the_device_once_for_all_running_sequences(
    small_device: Callable[[], Any],
) -> None:
    engine = small_device()
    prefix = list(range(100, 100 + 12 * PAGE))
    requests = Requests(
        input_ids=[[*prefix, number] for number in range(5, 29)],
        sampling_params=[{"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}] * 24,
    )
    alone = [engine.generate(input_ids=ids, sampling_params=requests.sampling_params[0]) for ids in requests.input_ids]
    answered, counts = counted(engine, lambda: answers(engine, requests))
    assert answered == [answer["output_ids"] for answer in alone]
    assert counts["decode_rows"] / counts["decode_groups"] > 2, "unshared, each takes 14 of 20 pages: one would run"
    assert counts["prompt_pages_found_on_device"] > 0
    stats = engine.batch_stats()
    assert stats["free_pages"] == POOL_PAGES
    assert stats["store"]["free_pages"] == stats["store"]["total_pages"]


def test_an_aborted_sequence_gives_back_its_pages_and_store_blocks(
    small_device: Callable[[], Any], requests: Requests
) -> None:
    engine = small_device()
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
        model_path=model_path(FAMILIES[0]),
        dtype="float32",
        max_total_tokens=4096,
        kv_store_bytes=1 << 20,
        kv_store_mode="inclusive",
        **SMALL,
    )
    with pytest.raises(ValueError, match=r"313 pages of 8 tokens, but the host KV store holds 64; .* --kv-store-bytes"):
        engine.generate(input_ids=[5] * 2000, sampling_params={"temperature": 0, "max_new_tokens": 500})
    assert engine.generate(input_ids=[5] * 20, sampling_params={"max_new_tokens": 3})["meta_info"]["completion_tokens"]


@pytest.mark.parametrize("prompt_tokens", [1, 8, 9, 30])
def test_choices_in_the_store_compute_their_prompt_once(
    prompt_tokens: int,
    batch_engine: Callable[..., Any],
    small_device: Callable[[], Any],
) -> None:
    prompts = [[7 + index] * prompt_tokens for index in range(12)]
    sampling = {"n": 4, "temperature": 1.0, "sampling_seed": 3, "max_new_tokens": 20, "ignore_eos": True}
    expected = [
        answer["output_ids"]
        for answer in batch_engine(FAMILIES[0], **SMALL).generate(input_ids=prompts, sampling_params=sampling)
    ]
    engine = small_device()
    before = Counter(engine.batch_stats()["counters"])
    answered = engine.generate(input_ids=prompts, sampling_params=sampling)
    assert [answer["output_ids"] for answer in answered] == expected
    stats = engine.batch_stats()
    counted = Counter(stats["counters"])
    counted.subtract(before)
    assert counted["prompt_tokens"] == 12 * (prompt_tokens + 3), "each further choice computes one row"
    assert (counted["recomputed_tokens_planned"], counted["recomputed_tokens_unplanned"]) == (12 * 3, 0)
    assert stats["store"]["free_pages"] == stats["store"]["total_pages"]
    assert stats["free_pages"] == POOL_PAGES
