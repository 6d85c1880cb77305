"""Sequences that reserve less than they can need: the same tokens, nothing computed twice, and all pages free again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import FAMILIES
from .shared_prompts import PAGE, Requests, answers, check_mixed, prompts_that_begin_alike

pytestmark = pytest.mark.engine

# Of test/moving_callbacks.py: all that fits moves at each boundary, and ranks decode in turns at the end.
ROTATE, HOLD = "moving_callbacks:rotate", "moving_callbacks:hold_all_but_one"
POOL_PAGES = 24
# On each of two ranks: enough for several sequences, and for none of them to be the only one that grows.
RANK_PAGES = 36
SMALL = {"page_size": PAGE, "boundary_tokens": PAGE, "b_moe_decode": 16, "b_moe_prefill": 700, "b_attn_prefill": 64}


@pytest.fixture
def requests() -> Requests:
    """Some of them end by themselves long before their max_tokens."""
    made = prompts_that_begin_alike(48, random.Random(5), output_lengths=(8, 24, 60, 70))
    for parameters in made.sampling_params:
        parameters["ignore_eos"] = False
    return made


@pytest.fixture
def small(model_path: Callable[[str], str]) -> dict[str, Any]:
    """Return the arguments of an engine whose device holds few of the sequences."""
    return {"model_path": model_path(FAMILIES[0]), "dtype": "float32", "max_total_tokens": PAGE * POOL_PAGES, **SMALL}


def check(engine: Any, requests: Requests, expected: list[list[int]], *, pages: int) -> dict[str, int]:
    """An engine gives these tokens under pressure, and has all pages free afterwards; its counters."""
    assert answers(engine, requests) == expected
    stats = engine.batch_stats()
    assert stats["free_pages"] == stats["total_pages"] == pages
    counters: dict[str, int] = stats["counters"]
    assert counters["recomputed_tokens_unplanned"] == 0
    assert counters["suspensions"] > 0, "reservations were too small"
    return counters


def test_tokens_are_the_same_under_all_policies_without_a_store(
    requests: Requests,
    tmp_path: Path,
    small: dict[str, Any],
    batch_engine: Callable[..., Any],
    started: Callable[..., Any],
) -> None:
    expected = answers(batch_engine(FAMILIES[0], **SMALL), requests)
    two_page = started(admission="two-page", kv_store_dir=str(tmp_path), **small)
    counters = check(two_page, requests, expected, pages=POOL_PAGES)
    assert counters["sequences_overflowed"] > 0
    assert counters["pages_restored"] > 0
    check(two_page, requests, expected, pages=POOL_PAGES)
    check_mixed(two_page, requests, expected, share=0)
    two_page.shutdown()
    in_place = started(admission="two-page", kv_store_dir=str(tmp_path / "absent"), **small)
    counters = check(in_place, requests, expected, pages=POOL_PAGES)
    assert counters.get("sequences_overflowed", 0) == 0
    assert counters["reservations_exceeded"] > 0, "without a file, sequences go on one after the other"
    in_place.shutdown()
    forecast = started(admission="forecast", kv_store_dir=str(tmp_path), **small)
    check(forecast, requests, expected, pages=POOL_PAGES)


def test_choices_and_aborts_leave_no_page_behind(
    requests: Requests,
    tmp_path: Path,
    small: dict[str, Any],
    batch_engine: Callable[..., Any],
    started: Callable[..., Any],
) -> None:
    prompts = [[7 + index] * 30 for index in range(12)]
    sampling = {"n": 4, "temperature": 1.0, "sampling_seed": 3, "max_new_tokens": 60, "ignore_eos": True}
    expected = [
        answer["output_ids"]
        for answer in batch_engine(FAMILIES[0], **SMALL).generate(input_ids=prompts, sampling_params=sampling)
    ]
    engine = started(
        admission="two-page",
        kv_store_dir=str(tmp_path),
        **small,
    )
    answered = engine.generate(input_ids=prompts, sampling_params=sampling)
    assert [answer["output_ids"] for answer in answered] == expected
    assert engine.batch_stats()["counters"]["sequences_overflowed"] > 0

    async def abort_in_the_middle() -> list[str]:
        long = {"temperature": 0, "max_new_tokens": 120, "ignore_eos": True}
        streams = [
            await engine.async_generate(input_ids=ids, sampling_params=long, stream=True) for ids in requests.input_ids
        ]
        return await asyncio.gather(*(ending(stream) for stream in streams))

    async def ending(stream: Any) -> str:
        async for chunk in stream:
            if chunk["meta_info"]["completion_tokens"] >= 60:
                engine.tokenizer_manager.abort_request(abort_all=True)
        return str(chunk["meta_info"]["finish_reason"]["type"])

    assert "abort" in engine.loop.run_until_complete(abort_in_the_middle())
    stats = engine.batch_stats()
    assert stats["free_pages"] == stats["total_pages"] == POOL_PAGES
    again = engine.generate(input_ids=prompts, sampling_params=sampling)
    assert [answer["output_ids"] for answer in again] == expected


def test_in_an_exclusive_store_sequences_that_have_outgrown_the_device_wait(
    requests: Requests,
    small: dict[str, Any],
    batch_engine: Callable[..., Any],
    started: Callable[..., Any],
) -> None:
    expected = answers(batch_engine(FAMILIES[0], **SMALL), requests)
    engine = started(
        kv_store_mode="exclusive",
        kv_store_bytes=POOL_PAGES * 16384,
        admission="forecast",
        **small,
    )
    counters = check(engine, requests, expected, pages=POOL_PAGES)
    store = engine.batch_stats()["store"]
    assert store["exclusive"]
    assert store["free_pages"] == store["total_pages"]
    assert counters["sequences_overflowed"] > 0


@pytest.mark.parametrize(
    ("admission", "moving", "store"),
    [
        ("forecast", {"on_refill": ROTATE, "on_long_tail": ROTATE}, {}),
        ("two-page", {"migration": "always"}, {"kv_store_mode": "exclusive", "kv_store_bytes": 2 * RANK_PAGES * 16384}),
        (
            "forecast",
            {"on_refill": ROTATE, "on_long_tail": HOLD},
            {"kv_store_mode": "inclusive", "kv_store_bytes": 80 * 16384},
        ),
    ],
    ids=["file, callbacks", "exclusive store", "inclusive store, callbacks"],
)
def test_two_ranks_give_the_tokens_of_one_that_reserves_all(
    admission: str,
    moving: dict[str, str],
    store: dict[str, Any],
    tmp_path: Path,
    small: dict[str, Any],
    batch_engine: Callable[..., Any],
    started: Callable[..., Any],
) -> None:
    requests = prompts_that_begin_alike(40, random.Random(6), output_lengths=(9, 40, 90, 104))
    expected = answers(batch_engine(FAMILIES[0], **SMALL), requests)
    small["max_total_tokens"] = PAGE * RANK_PAGES
    engine = started(
        admission=admission,
        **moving,
        **(store or {"kv_store_dir": str(tmp_path)}),
        **small,
        **{"tp_size": 2, "dp_size": 2, "ep_size": 2, "enable_dp_attention": True, "rank_timeout_s": 60.0},
    )
    counters = check(engine, requests, expected, pages=2 * RANK_PAGES)
    assert counters["sequences_arrived"] == counters["sequences_departed"] > 0
    stats = engine.batch_stats()
    assert all(rank["counters"]["suspensions"] > 0 for rank in stats["ranks"])
    assert stats["store"].get("free_pages") == stats["store"].get("total_pages")
    if store.get("kv_store_mode") != "inclusive":
        assert counters["sequences_overflowed"] > 0
    if not store:
        assert counters["overflow_bytes"] > 0
        assert list(tmp_path.iterdir()) == [], "the ranks' files have no names"
        check_mixed(engine, requests, expected, share=0)


@pytest.mark.parametrize("decode_kv", ["resident", "streamed"])
def test_tokens_are_the_same_in_a_store_that_cannot_hold_all_needs(
    decode_kv: str,
    requests: Requests,
    small: dict[str, Any],
    batch_engine: Callable[..., Any],
    started: Callable[..., Any],
) -> None:
    expected = answers(batch_engine(FAMILIES[0], **SMALL), requests)
    engine = started(
        kv_store_mode="inclusive",
        kv_store_bytes=40 * 16384,
        decode_kv=decode_kv,
        admission="two-page",
        **small,
    )
    counters = check(engine, requests, expected, pages=POOL_PAGES)
    store = engine.batch_stats()["store"]
    assert store["free_pages"] == store["total_pages"]
    assert counters["recomputed_tokens_unplanned"] == 0
