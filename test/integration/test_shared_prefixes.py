"""Whole pages that prompts share are computed once and kept once; tokens are the same and counts add up."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from .conftest import FAMILIES
from .shared_prompts import PAGE, answers, counted, prompts_that_begin_alike, rows_of_one_group
from .test_ranks import ranks

pytestmark = pytest.mark.engine

SMALL = {"page_size": PAGE, "boundary_tokens": PAGE, "b_moe_decode": 64, "b_moe_prefill": 300}
SUB_BATCH = 24  # cuts prompts


def test_each_shared_page_of_live_prompts_is_computed_once(batch_engine: Callable[..., Any]) -> None:
    engine = batch_engine(FAMILIES[0], SUB_BATCH, **SMALL)
    engine.set_plan(share_prefixes=True)
    requests = prompts_that_begin_alike(60, random.Random(2), output_lengths=(200,))
    _, counts = counted(engine, lambda: answers(engine, requests))
    assert counts["prefill_groups"] > 1
    assert counts["prompt_tokens"] == rows_of_one_group(requests.input_ids)


def test_a_prompt_with_log_probabilities_is_computed_whole(batch_engine: Callable[..., Any]) -> None:
    engine = batch_engine(FAMILIES[0], SUB_BATCH, **SMALL)
    prompt = list(range(100, 133))
    sampling = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    alone = engine.generate(input_ids=prompt, sampling_params=sampling, return_logprob=True, logprob_start_len=0)
    results, counts = counted(
        engine,
        lambda: engine.generate(
            input_ids=[prompt] * 4,
            sampling_params=sampling,
            return_logprob=[False, True, True, False],
            logprob_start_len=[-1, 0, -1, -1],
        ),
    )
    assert counts["prompt_tokens_shared"] == 2 * 32, "the third and the fourth share with the first"
    meta = results[1]["meta_info"]
    assert meta["input_token_logprobs"] == alone["meta_info"]["input_token_logprobs"]
    assert meta["output_token_logprobs"] == results[2]["meta_info"]["output_token_logprobs"]
    assert [result["output_ids"] for result in results] == [alone["output_ids"]] * 4


@pytest.mark.parametrize("leader_tokens", [1, 400])
def test_sequences_that_share_a_prompt_go_on_when_the_one_that_computed_it_ends_or_is_aborted(
    leader_tokens: int, batch_engine: Callable[..., Any]
) -> None:
    engine = batch_engine(FAMILIES[0], SUB_BATCH, **SMALL)
    rng = random.Random(leader_tokens)
    prefix = [rng.randrange(5, 3000) for _ in range(5 * PAGE)]
    tails = [[7 + number] * length for number, length in enumerate((1, 8, 20))]
    sampling = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
    engine.set_plan(share_prefixes=False)
    expected = [engine.generate(input_ids=prefix + tail, sampling_params=sampling)["output_ids"] for tail in tails]
    engine.set_plan(share_prefixes=True)

    async def lead_and_follow() -> list[list[int]]:
        first = {**sampling, "max_new_tokens": leader_tokens}
        leader = await engine.async_generate(input_ids=[*prefix, 5], sampling_params=first, stream=True, rid="leader")
        if leader_tokens > 1:
            await anext(leader)
        followers = [
            await engine.async_generate(input_ids=prefix + tail, sampling_params=sampling, stream=True)
            for tail in tails
        ]
        last = [await anext(follower) for follower in followers]
        engine.tokenizer_manager.abort_request("leader")
        async for out in leader:
            reason = out["meta_info"]["finish_reason"]
        assert reason["type"] == ("abort" if leader_tokens > 1 else "length")
        for number, follower in enumerate(followers):
            async for out in follower:
                last[number] = out
        return [out["output_ids"] for out in last]

    answered, counts = counted(engine, lambda: engine.loop.run_until_complete(lead_and_follow()))
    assert answered == expected
    assert counts["prompt_tokens_shared"] == len(tails) * len(prefix) or leader_tokens == 1
    stats = engine.batch_stats()
    assert stats["free_pages"] == stats["total_pages"]
    _, counts = counted(engine, lambda: engine.generate(input_ids=[*prefix, 5], sampling_params=sampling))
    assert counts.get("prompt_tokens_shared", 0) == 0, "no sequence holds the prefix any more"


def test_sequences_that_share_a_prefix_move_between_ranks_with_all_their_pages(
    batch_engine: Callable[..., Any],
) -> None:
    requests = prompts_that_begin_alike(60, random.Random(3))
    expected = answers(batch_engine(FAMILIES[0], SUB_BATCH, **SMALL), requests)
    engine = batch_engine(FAMILIES[0], SUB_BATCH, **SMALL, **ranks(2))
    answered, counts = counted(engine, lambda: answers(engine, requests))
    assert answered == expected
    assert counts["sequences_departed"] == counts["sequences_arrived"] > 30
    assert counts["prompt_tokens"] + counts["prompt_tokens_shared"] == sum(map(len, requests.input_ids))
    assert counts["prompt_tokens_shared"] > 0
    stats = engine.batch_stats()
    assert stats["free_pages"] == stats["total_pages"]
