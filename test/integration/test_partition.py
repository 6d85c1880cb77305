"""Sequences and prompts that several ranks run together give one rank's tokens, and are answered once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from .conftest import FAMILIES, Prompts, Reference
from .paused_runs import run_paused
from .test_parity import generate
from .test_ranks import SAMPLED, held_up_at_random, rank_processes, ranks

pytestmark = pytest.mark.engine

# All sequences run at once, as at the end of a batch.
LEAST_PROMPT = 150
TAIL = {
    "b_moe_decode": 32,
    "boundary_tokens": 4,
    "partition_prompt_tokens": LEAST_PROMPT,
    "speculate": "3",
    "partition_experts": "split",
    **ranks(2, migration="partition"),
}


@pytest.fixture
def one(batch_engine: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: batch_engine(FAMILIES[0], 7, dtype="bfloat16")


# Owners write pages to the store as they fill; replicas have none there.
WITH_AND_WITHOUT_STORE = pytest.mark.parametrize(
    "two", [{}, {"kv_store_bytes": 64 << 20, "kv_store_mode": "inclusive"}], ids=["device", "store"], indirect=True
)


@pytest.fixture
def two(batch_engine: Callable[..., Any], request: pytest.FixtureRequest) -> Callable[[], Any]:
    return lambda: batch_engine(FAMILIES[0], 7, dtype="bfloat16", **TAIL, **getattr(request, "param", {}))


def counted(engine: Any, before: dict[str, int]) -> Counter[str]:
    """Return what was counted since `before`, and check that nothing is left."""
    stats = engine.batch_stats()
    assert stats["free_pages"] == stats["total_pages"]
    store = stats.get("store") or {"free_pages": 0, "total_pages": 0}
    assert store["free_pages"] == store["total_pages"]
    assert stats["sequences"] == {}
    return Counter(stats["counters"]) - Counter(before)


def check_counts(counts: Counter[str], outputs: list[list[int]]) -> None:
    """Check that partitions began, and that each sequence and token was counted once."""
    assert counts["partitions"] > 1
    assert counts["partitions_undone"] == 0
    assert counts["replicas_made"] == counts["sequences_partitioned"] > counts["partitions"]
    assert counts["replica_bytes"] > counts["replicas_made"]
    assert counts["partitioned_passes"] > counts["partitions"], "ranks of a set share their passes"
    assert counts["sequences_finished"] == len(outputs)
    assert counts["generated_tokens"] == counts["output_tokens"] == sum(map(len, outputs))


@WITH_AND_WITHOUT_STORE
def test_greedy_tokens_are_those_of_one_rank_when_ranks_are_held_up_too(
    one: Callable[[], Any], two: Callable[[], Any], prompts: Prompts
) -> None:
    alone, engine = generate(one(), prompts), two()
    before = engine.batch_stats()["counters"]
    assert generate(engine, prompts) == alone
    counts = counted(engine, before)
    check_counts(counts, alone)
    assert counts["drafts_accepted"] > 0, "the ranks of a set verify drafts"
    assert counts["split_expert_calls"] > counts["partitioned_passes"], "and share each expert"
    with held_up_at_random(rank_processes(engine)):
        assert generate(engine, prompts) == alone


def test_sampled_tokens_with_penalties_are_those_of_one_rank(
    one: Callable[[], Any], two: Callable[[], Any], prompts: Prompts
) -> None:
    sampling = [{**SAMPLED, "sampling_seed": seed} for seed in range(len(prompts.input_ids))]

    def sampled(engine: Any) -> list[list[int]]:
        results = engine.generate(input_ids=prompts.input_ids, sampling_params=sampling)
        return [result["output_ids"] for result in results]

    alone, engine = sampled(one()), two()
    before = engine.batch_stats()["counters"]
    assert sampled(engine) == alone
    check_counts(counted(engine, before), alone)


LONG = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}


def asked(engine: Any, prompts: Prompts) -> list[list[int]]:
    results = engine.generate(input_ids=prompts.input_ids[:6], sampling_params=LONG)
    return [result["output_ids"] for result in results]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_changes_no_answer(mode: str, one: Callable[[], Any], two: Callable[[], Any], prompts: Prompts) -> None:
    alone, engine = asked(one(), prompts), two()
    before = engine.batch_stats()["counters"]
    requests = [{"input_ids": ids, "sampling_params": LONG} for ids in prompts.input_ids[:6]]
    assert [answer["output_ids"] for answer in run_paused(engine, requests, mode)] == alone
    assert counted(engine, before)["partitions"] > 1


def test_an_abort_ends_a_partitioned_sequence_everywhere_and_an_arrival_ends_the_partition(
    one: Callable[[], Any], two: Callable[[], Any], prompts: Prompts
) -> None:
    alone, engine = asked(one(), prompts), two()
    before = engine.batch_stats()["counters"]

    async def ask(number: int, rid: str, most: int = 60) -> tuple[list[int], str]:
        sampling = {**LONG, "max_new_tokens": most}
        last: dict[str, Any] = {}
        stream = await engine.async_generate(
            input_ids=prompts.input_ids[number], sampling_params=sampling, rid=rid, stream=True
        )
        async for last in stream:
            progress[rid] = last["meta_info"]["completion_tokens"]
        return last["output_ids"], last["meta_info"]["finish_reason"]["type"]

    async def reached(rid: str, tokens: int) -> None:
        while progress.get(rid, 0) < tokens:
            await asyncio.sleep(0.001)

    async def scenario() -> list[tuple[list[int], str]]:
        tasks = [asyncio.ensure_future(ask(number, f"r{number}")) for number in range(3)]
        tasks.append(asyncio.ensure_future(ask(3, "endless", 2000)))
        await reached("r0", 20)
        tasks += [asyncio.ensure_future(ask(number, f"r{number}")) for number in (4, 5)]
        await reached("r4", 20)
        engine.tokenizer_manager.abort_request(rid="endless")
        return list(await asyncio.gather(*tasks))

    progress: dict[str, int] = {}
    answers = engine.loop.run_until_complete(asyncio.wait_for(scenario(), 120))
    assert [reason for _, reason in answers] == ["length"] * 3 + ["abort"] + ["length"] * 2
    kept = [tokens for tokens, reason in answers if reason == "length"]
    assert kept == alone[:3] + alone[4:]
    counts = counted(engine, before)
    assert (counts["sequences_finished"], counts["sequences_aborted"]) == (5, 1)
    assert counts["partitions"] > 1


def test_latent_attention_gives_hugging_faces_tokens(
    batch_engine: Callable[..., Any], reference: Callable[[str, str], Reference], prompts: Prompts
) -> None:
    engine = batch_engine(FAMILIES[2], 7, **TAIL)
    before = engine.batch_stats()["counters"]
    outputs = generate(engine, prompts)
    assert outputs == reference(FAMILIES[2], "float32").tokens
    check_counts(counted(engine, before), outputs)


@WITH_AND_WITHOUT_STORE
def test_a_lone_long_prompt_is_computed_by_all_ranks_and_gives_the_tokens_of_one(
    one: Callable[[], Any], two: Callable[[], Any]
) -> None:
    """The longest takes two expert calls a layer. The choices fork from it where it is owned."""
    draw = random.Random(5)
    lengths = (LEAST_PROMPT, LEAST_PROMPT - 1, 3 * LEAST_PROMPT + 7, 900)
    lone = [[draw.randrange(5, 250) for _ in range(length)] for length in lengths]
    sampling = {"temperature": 0.8, "sampling_seed": 3, "max_new_tokens": 12, "ignore_eos": True, "n": 2}

    def answered(engine: Any, **more: Any) -> list[list[int]]:
        answers = [engine.generate(input_ids=[ids], sampling_params=sampling, **more) for ids in lone]
        return [choice["output_ids"] for choices in answers for choice in choices]

    alone, engine = answered(one()), two()
    before = engine.batch_stats()["counters"]
    assert answered(engine) == alone
    counts = counted(engine, before)
    assert (counts["prompts_partitioned"], counts["prompts_not_partitioned"]) == (3, 0)
    assert counts["prompt_tokens"] == sum(lengths) + len(lengths), (
        "the owner counts a prompt, and a choice's last token"
    )
    assert answered(engine, return_logprob=True) == alone
    assert counted(engine, before)["prompts_partitioned"] == 3, "log probabilities keep a prompt on its rank"
