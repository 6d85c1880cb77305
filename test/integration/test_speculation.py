"""Drafts change no answer, right or wrong, and right ones save passes."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_batch import Engine

from . import drafters
from .conftest import FAMILIES, Prompts, Traces
from .shared_prompts import PAGE, counted

pytestmark = pytest.mark.engine

GREEDY = {"temperature": 0, "ignore_eos": True}
SEEDED = {"temperature": 0.7, "top_p": 0.9, "ignore_eos": True}
SCHEMA = json.dumps({"type": "array", "items": {"enum": ["duck", 7]}, "maxItems": 3})


def ask(engine: Any, requests: list[dict[str, Any]], speculate: str) -> tuple[list[Any], dict[str, int]]:
    """Return the answer to each request, and what the engine counted for all; it does not speculate afterwards."""

    async def gathered() -> list[Any]:
        return list(await asyncio.gather(*(engine.async_generate(**request) for request in requests)))

    engine.set_plan(speculate=speculate)
    try:
        answers, counts = counted(engine, lambda: engine.loop.run_until_complete(asyncio.wait_for(gathered(), 300)))
    finally:
        engine.set_plan(speculate="off")
    stats = engine.batch_stats()
    assert stats["free_pages"] == stats["total_pages"]
    assert stats["store"].get("free_pages", 0) == stats["store"].get("total_pages", 0)
    assert stats["counters"].get("recomputed_tokens_unplanned", 0) == 0
    assert stats["sequences"] == {}
    return answers, counts


def content(answers: list[Any]) -> list[Any]:
    """Return all that was answered, choice by choice."""
    choices = [choice for answer in answers for choice in (answer if isinstance(answer, list) else [answer])]
    return [(c["output_ids"], c["text"], c["meta_info"]["finish_reason"]) for c in choices]


def log_probabilities(answers: list[Any]) -> list[Any]:
    choices = [choice for answer in answers for choice in (answer if isinstance(answer, list) else [answer])]
    return [[one[0] for one in c["meta_info"].get("output_token_logprobs") or ()] for c in choices]


# Sub-batches are cut alike for all families.
@pytest.mark.parametrize(("family", "b_attn"), [(FAMILIES[0], 3), *((family, None) for family in FAMILIES)])
def test_answers_do_not_depend_on_drafts(
    family: str, b_attn: int | None, batch_engine: Callable[..., Any], prompts: Prompts
) -> None:
    engine = batch_engine(family, b_attn)
    ids = prompts.input_ids
    requests: list[dict[str, Any]] = [
        {"input_ids": ids[0], "sampling_params": {**GREEDY, "max_new_tokens": 90}},
        {"input_ids": ids[1], "sampling_params": {**SEEDED, "sampling_seed": 11, "max_new_tokens": 70}},
        {"input_ids": ids[2], "sampling_params": {**SEEDED, "sampling_seed": 12, "n": 3, "max_new_tokens": 30}},
        {"input_ids": ids[3], "sampling_params": {"temperature": 0, "max_new_tokens": 60, "stop": ["e", ". "]}},
        {"input_ids": ids[4], "sampling_params": {"temperature": 0.4, "sampling_seed": 13, "max_new_tokens": 60}},
        {"input_ids": ids[5], "sampling_params": {**GREEDY, "logit_bias": {"7": 2.0}, "max_new_tokens": 40}},
    ]
    expected, apart = ask(engine, requests, "off")
    for speculate in ("7", "auto"):
        answers, counts = ask(engine, requests, speculate)
        assert content(answers) == content(expected)
        assert counts["output_tokens"] == apart["output_tokens"]
        if speculate == "7":
            assert 0 < counts["drafts_accepted"] < counts["drafts"]
            assert counts["decode_groups"] < apart["decode_groups"], "right drafts save passes"
    assert not apart.get("drafts")


def test_groups_whose_steps_depend_on_more_than_tokens_draft_nothing(
    batch_engine: Callable[..., Any], prompts: Prompts
) -> None:
    engine = batch_engine(FAMILIES[0])
    ids, more = prompts.input_ids[4], {**GREEDY, "max_new_tokens": 40}
    for request in (
        {"sampling_params": {**more, "frequency_penalty": 0.5}},
        {"sampling_params": {**more, "json_schema": SCHEMA}},
        {"sampling_params": more, "return_logprob": True},
    ):
        requests: list[dict[str, Any]] = [{"input_ids": ids, **request}]
        expected, _ = ask(engine, requests, "off")
        answers, counts = ask(engine, requests, "7")
        assert content(answers) == content(expected)
        assert log_probabilities(answers) == log_probabilities(expected)
        assert not counts.get("drafts")


@pytest.fixture(scope="module")
def drafting_engine(
    model_path: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Any]]:
    """An engine with the drafter of these tests, small pages, and an inclusive store to which sequences give way."""
    traces = Traces(tmp_path_factory.mktemp("drafting"))
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    engine = Engine(
        model_path=model_path(FAMILIES[0]),
        dtype="float32",
        page_size=PAGE,
        boundary_tokens=3 * PAGE,
        b_moe_decode=8,
        b_attn_decode=5,
        max_total_tokens=24 * PAGE,
        kv_store_bytes=16 << 20,
        kv_store_checksums=True,
        decode_kv="resident",
        drafter="drafters:remembered",
        **traces.new(),
    )
    yield engine
    engine.shutdown()
    monkeypatch.undo()
    traces.check()


def drafted_requests(kind: int, rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Return requests whose drafts are of this kind; every third is sampled with a seed."""
    made = []
    for index in range(count):
        ids = [kind, *(rng.randrange(10, 3000) for _ in range(rng.randrange(drafters.NAMED, 4 * PAGE)))]
        sampling = GREEDY if index % 3 else {**SEEDED, "sampling_seed": index}
        made.append(
            {"input_ids": ids, "sampling_params": {**sampling, "max_new_tokens": rng.choice((1, 9, 64, 72, 80, 80))}}
        )
    return made


@pytest.mark.parametrize("kind", [drafters.RIGHT, drafters.WRONG, drafters.MIXED])
def test_answers_are_the_same_with_right_and_with_wrong_drafts(kind: int, drafting_engine: Any) -> None:
    requests = drafted_requests(kind, random.Random(kind), 12)
    expected, apart = ask(drafting_engine, requests, "off")
    ask(drafting_engine, requests, "1")  # the drafter sees the answers
    answers, counts = ask(drafting_engine, requests, "7")
    assert content(answers) == content(expected)
    assert counts["output_tokens"] == apart["output_tokens"]
    assert counts["drafts"] > 50
    shares = {drafters.RIGHT: (1.0, 1.0), drafters.WRONG: (0.0, 0.0), drafters.MIXED: (0.1, 0.9)}
    low, high = shares[kind]
    assert low <= counts.get("drafts_accepted", 0) / counts["drafts"] <= high
    assert counts["suspensions"] > 0, "sequences were suspended and restored between boundaries"


def test_a_sequence_ends_where_it_ends_without_drafts(drafting_engine: Any) -> None:
    rng = random.Random(3)
    requests = [
        {**request, "sampling_params": {**request["sampling_params"], "max_new_tokens": 64}}
        for request in drafted_requests(drafters.RIGHT, rng, 8)
    ]
    whole, _ = ask(drafting_engine, requests, "off")
    ask(drafting_engine, requests, "1")
    stopped = []
    for index, (request, answer) in enumerate(zip(requests, whole, strict=True)):
        text, ids = answer["text"], answer["output_ids"]
        stops = [
            {"stop_token_ids": [ids[rng.randrange(len(ids))]]},
            {"stop": [text[(at := rng.randrange(len(text) - 3)) : at + 3]]},
            {"max_new_tokens": rng.randrange(2, 64)},
        ][index % 3]
        stopped.append({**request, "sampling_params": {**request["sampling_params"], **stops}})
    expected, _ = ask(drafting_engine, stopped, "off")
    answers, counts = ask(drafting_engine, stopped, "7")
    assert content(answers) == content(expected)
    assert counts["drafts_accepted"] > 0
