"""Ranks that share one store give one rank's tokens: sequences move with their store blocks, and none is lost."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_batch import Engine

from .conftest import FAMILIES, Traces
from .shared_prompts import PAGE, Requests, answers, check_mixed, counted, prompts_that_begin_alike

pytestmark = pytest.mark.engine

POOL_PAGES = 20
SMALL = {"page_size": PAGE, "boundary_tokens": PAGE, "b_moe_decode": 16, "b_moe_prefill": 700, "b_attn_prefill": 64}
TWO_RANKS = {"tp_size": 2, "dp_size": 2, "ep_size": 2, "enable_dp_attention": True, "rank_timeout_s": 60.0}
CHOICES = {"n": 4, "temperature": 1.0, "sampling_seed": 3, "max_new_tokens": 20, "ignore_eos": True}


@pytest.fixture(scope="module")
def skewed() -> Requests:
    """Requests with long outputs for one rank and short ones for the other; they go to ranks in turn."""
    long, short = (
        prompts_that_begin_alike(36, random.Random(seed), lengths) for seed, lengths in ((1, (40, 70, 90)), (2, (1, 8)))
    )

    def mixed(some: list[Any], others: list[Any]) -> list[Any]:
        return [item for pair in zip(some, others, strict=True) for item in pair]

    return Requests(mixed(long.input_ids, short.input_ids), mixed(long.sampling_params, short.sampling_params))


@pytest.fixture(params=["resident", "streamed"])
def two_ranks(
    request: pytest.FixtureRequest, tmp_path: Path, model_path: Callable[[str], str], traces: Traces
) -> Iterator[Any]:
    engine = Engine(
        model_path=model_path(FAMILIES[0]),
        dtype="float32",
        max_total_tokens=PAGE * POOL_PAGES,
        kv_store_bytes=64 << 20,
        kv_store_dir=str(tmp_path),
        kv_store_checksums=True,
        decode_kv=request.param,
        **traces.new(),
        **TWO_RANKS,
        **SMALL,
    )
    yield engine
    engine.shutdown()


def test_two_ranks_with_one_store_give_one_rank_s_tokens(
    skewed: Requests, batch_engine: Callable[..., Any], two_ranks: Any
) -> None:
    def chosen(engine: Any) -> list[list[int]]:
        answered = engine.generate(input_ids=skewed.input_ids[:12], sampling_params=CHOICES)
        return [answer["output_ids"] for answer in answered]

    roomy = batch_engine(FAMILIES[0], **SMALL)
    expected, one = counted(roomy, lambda: answers(roomy, skewed))
    given, counts = counted(two_ranks, lambda: answers(two_ranks, skewed))
    assert given == expected
    assert counts["decode_rows"] == one["decode_rows"], "no row is computed twice"
    assert counts["sequences_arrived"] == counts["sequences_departed"] > 5
    assert counts["recomputed_tokens_unplanned"] == 0
    assert chosen(two_ranks) == chosen(roomy)
    stats = two_ranks.batch_stats()
    for rank in stats["ranks"]:
        counters = rank["counters"]
        assert counters.get("suspensions", 0) > 5 or counters.get("streamed_steps", 0) == counters["decode_groups"]
    assert stats["free_pages"] == stats["total_pages"] == 2 * POOL_PAGES
    assert stats["store"]["free_pages"] == stats["store"]["total_pages"]
    check_mixed(two_ranks, skewed, expected)


def test_a_sequence_may_use_more_than_its_rank_s_part_of_the_store(
    model_path: Callable[[str], str], batch_engine: Callable[..., Any], traces: Traces
) -> None:
    """Of 24 blocks for two ranks one request needs 18, in the middle of many that need few."""
    path = model_path(FAMILIES[0])
    config = json.loads((Path(path) / "config.json").read_text())
    values = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    rng = random.Random(7)
    small = prompts_that_begin_alike(24, rng, (8, 20, 40))
    input_ids, parameters = list(small.input_ids), list(small.sampling_params)
    input_ids[9] = [rng.randrange(5, 3000) for _ in range(60)]
    parameters[9] = {"temperature": 0, "max_new_tokens": 18 * PAGE - 60, "ignore_eos": True}
    requests = Requests(input_ids, parameters)
    expected = answers(batch_engine(FAMILIES[0], **SMALL), requests)
    engine = Engine(
        model_path=path,
        dtype="float32",
        max_total_tokens=PAGE * POOL_PAGES,
        kv_store_bytes=24 * PAGE * values * 4,
        kv_store_mode="inclusive",
        **traces.new(),
        **TWO_RANKS,
        **SMALL,
    )
    try:
        assert engine.batch_stats()["store"]["total_pages"] == 24
        given, counts = counted(engine, lambda: answers(engine, requests))
        assert given == expected
        assert counts["recomputed_tokens_unplanned"] == 0
        store = engine.batch_stats()["store"]
        assert store["free_pages"] == store["total_pages"]
    finally:
        engine.shutdown()
