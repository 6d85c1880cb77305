"""Overlap of results with the next step changes no answer, and ended sequences give back what they computed."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sgl_batch import Engine

from .conftest import FAMILIES
from .shared_prompts import PAGE, counted, prompts_that_begin_alike

pytestmark = pytest.mark.engine

SMALL = {"page_size": PAGE, "boundary_tokens": PAGE, "b_moe_decode": 16, "b_moe_prefill": 700, "b_attn_prefill": 64}
POOL_PAGES = 20
STORE = {"max_total_tokens": POOL_PAGES * PAGE, "kv_store_bytes": 64 << 20, "kv_store_checksums": True}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"max_total_tokens": 16384},
    "inclusive": {**STORE, "decode_kv": "resident"},
    "exclusive": {**STORE, "kv_store_mode": "exclusive", "decode_kv": "resident"},
}
SCHEMA = {"type": "array", "items": {"enum": ["duck", "egg", 7]}, "maxItems": 4}


@pytest.fixture(scope="module")
def seed() -> int:
    """The seed of the requests; the environment may set another one."""
    return int(os.environ.get("SGL_BATCH_TEST_SEED", "1"))


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(kind: str, model_path: Callable[[str], str]) -> Iterator[Any]:
    engine = Engine(model_path=model_path(FAMILIES[0]), **{"dtype": "float32", **SMALL, **KINDS[kind]})
    yield engine
    engine.shutdown()


def some_requests(rng: random.Random) -> list[dict[str, Any]]:
    """Return greedy and seeded requests that may end anywhere; some have several choices, some ask for logprobs."""
    plain = prompts_that_begin_alike(48, rng)
    variants: list[dict[str, Any]] = [{}] * 4
    variants += [{"n": 3, "temperature": 1.0, "sampling_seed": 3}, {"json_schema": json.dumps(SCHEMA)}, {"stop": ["e"]}]
    made = []
    for index, (ids, parameters) in enumerate(zip(plain.input_ids, plain.sampling_params, strict=True)):
        sampling = {**parameters, **variants[index % len(variants)], "ignore_eos": False}
        logprobs = {"return_logprob": True, "top_logprobs_num": 2} if index % 5 == 0 else {}
        made.append({"input_ids": ids, "sampling_params": sampling, **logprobs})
    return made


def ask(engine: Any, requests: list[dict[str, Any]], overlap: str) -> tuple[list[list[dict[str, Any]]], dict[str, int]]:
    """Return the answer to each request, choice by choice, and what the engine counted for all."""

    async def gathered() -> list[Any]:
        return list(await asyncio.gather(*(engine.async_generate(**request) for request in requests)))

    engine.set_plan(overlap=overlap)
    answers, counts = counted(engine, lambda: engine.loop.run_until_complete(asyncio.wait_for(gathered(), 120)))
    return [answer if isinstance(answer, list) else [answer] for answer in answers], counts


def content(answers: list[list[dict[str, Any]]]) -> list[Any]:
    """Return all that was answered; log probabilities are approximate, as neighbours may change the last digits."""
    return [
        (
            choice["output_ids"],
            choice["text"],
            choice["meta_info"]["finish_reason"],
            _near(choice["meta_info"].get("output_token_logprobs")),
            _near(choice["meta_info"].get("output_top_logprobs")),
        )
        for answer in answers
        for choice in answer
    ]


def _near(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_near(item) for item in value]
    return pytest.approx(value, abs=1e-5) if isinstance(value, float) else value


def with_stops(requests: list[dict[str, Any]], answers: list[list[dict[str, Any]]], rng: random.Random) -> list[Any]:
    """Return the same requests, most of which now end at a token of their known answer."""
    made = []
    for request, answer in zip(requests, answers, strict=True):
        stops = [rng.choice(answer[0]["output_ids"])] if rng.random() < 0.7 else []
        made.append({**request, "sampling_params": {**request["sampling_params"], "stop_token_ids": stops}})
    return made


def check_nothing_is_held(engine: Any) -> None:
    stats = engine.batch_stats()
    assert stats["free_pages"] == stats["total_pages"]
    assert stats["store"].get("free_pages", 0) == stats["store"].get("total_pages", 0)
    assert stats["counters"].get("recomputed_tokens_unplanned", 0) == 0
    assert stats["sequences"] == {}


def test_answers_do_not_depend_on_overlap(engine: Any, seed: int) -> None:
    rng = random.Random(seed)
    requests = some_requests(rng)
    free, _ = ask(engine, requests, "off")
    stopped = with_stops(requests, free, rng)
    expected, apart = ask(engine, stopped, "off")
    answers, overlapped = ask(engine, stopped, "on")
    assert content(answers) == content(expected)
    for choices, whole in zip(answers, free, strict=True):
        for choice, longer in zip(choices, whole, strict=True):
            assert choice["output_ids"] == longer["output_ids"][: len(choice["output_ids"])]
    assert not apart.get("decode_steps_overlapped")
    assert apart["tokens_discarded"] == 0
    for name in ("output_tokens", "generated_tokens", "sequences_finished"):
        assert overlapped.get(name) == apart.get(name), name
    assert overlapped["decode_rows"] == apart["decode_rows"] + overlapped["tokens_discarded"]
    assert overlapped["decode_steps_overlapped"] > 0
    assert overlapped["tokens_discarded"] > 0, "a sequence that ends before its length computes one token more"
    check_nothing_is_held(engine)


@pytest.mark.parametrize("kind", ["plain", "inclusive"], indirect=True)
def test_sequences_that_end_by_length_compute_no_extra_token(kind: str, engine: Any, seed: int) -> None:
    requests = [
        {**request, "sampling_params": {**request["sampling_params"], "ignore_eos": True}}
        for request in some_requests(random.Random(seed))
        if not request["sampling_params"].keys() & {"stop", "json_schema"}
    ]
    expected, apart = ask(engine, requests, "off")
    answers, overlapped = ask(engine, requests, "on")
    assert content(answers) == content(expected)
    assert overlapped["tokens_discarded"] == 0
    assert overlapped["decode_rows"] == apart["decode_rows"]
    check_nothing_is_held(engine)


@pytest.mark.parametrize("kind", ["plain"], indirect=True)
def test_groups_with_penalties_wait_for_each_result(kind: str, engine: Any, seed: int) -> None:
    requests = [
        {**request, "sampling_params": {**request["sampling_params"], "frequency_penalty": 0.5, "min_new_tokens": 1}}
        for request in some_requests(random.Random(seed))
    ]
    expected, _ = ask(engine, requests, "off")
    answers, overlapped = ask(engine, requests, "on")
    assert content(answers) == content(expected)
    assert not overlapped.get("decode_steps_overlapped")
    check_nothing_is_held(engine)


@pytest.mark.parametrize("kind", ["inclusive", "exclusive"], indirect=True)
def test_pages_reach_the_store_once_whichever_step_fills_them(kind: str, engine: Any, seed: int) -> None:
    """Also the first and the last step between boundaries, whose results reach the host at other moments."""
    rng = random.Random(seed)
    requests = [
        {
            "input_ids": [rng.randrange(5, 3000) for _ in range(rng.randrange(PAGE - 2, 2 * PAGE + 2))],
            "sampling_params": {"temperature": 0, "max_new_tokens": 9 * PAGE, "ignore_eos": True},
        }
        for _ in range(12)
    ]
    expected, _ = ask(engine, requests, "off")
    answers, overlapped = ask(engine, requests, "on")
    assert content(answers) == content(expected)
    assert overlapped["decode_steps_overlapped"] > 0
    assert overlapped["suspensions"] > 0
    if kind == "inclusive":
        assert overlapped["pages_written_through"] > 12
        assert overlapped["pages_copied_to_suspend"] <= overlapped["suspensions"], "at most the open page is copied"
    check_nothing_is_held(engine)
