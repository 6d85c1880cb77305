"""Prompts that are computed chunk by chunk beside decode rows end, or begin anew, wherever they stand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

from sgl_batch import Engine
from sgl_batch.errors import ConfigError

from .conftest import Prompts
from .paused_runs import ask, states

pytestmark = pytest.mark.engine

# No prefill group while anything runs.
MIXING = {"mix_prefill": 16, "b_moe_prefill": 64, "ready_ahead": 0.0, "refill_watermark": 0.0}
STORE = {"kv_store_bytes": 16 << 20, "decode_kv": "resident", "max_total_tokens": 1280}
BUSY = {"temperature": 0, "max_new_tokens": 300, "ignore_eos": True}
SHORT = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}


async def paused_while_begun(engine: Any, mode: str) -> bool:
    """Pause while a prompt is computed in part; whether it still is, when the pause has come."""
    manager = engine.tokenizer_manager
    while "PREFILLING" not in (await states(engine))[0]["sequences"]:
        await asyncio.sleep(0.001)
    await manager.pause_generation(PauseGenerationReqInput(mode="in_place"))
    (state,) = await states(engine)
    if "PREFILLING" not in state["sequences"]:
        return False
    if mode == "retract":
        await manager.pause_generation(PauseGenerationReqInput(mode=mode))
        (state,) = await states(engine)
        assert set(state["sequences"]) == {"QUEUED"}
        assert state["free_pages"] == state["total_pages"]
    return True


def run_with_begun(engine: Any, prompts: Prompts, mode: str) -> tuple[list[int], dict[str, Any]]:
    """The tokens of what decodes meanwhile, and the answer to a long prompt that is met half-way."""
    manager = engine.tokenizer_manager

    async def scenario() -> tuple[bool, Any, Any]:
        busy = asyncio.ensure_future(engine.async_generate(input_ids=prompts.input_ids[4], sampling_params=BUSY))
        while "RUNNING" not in (await states(engine))[0]["sequences"]:
            await asyncio.sleep(0.001)
        request = engine.async_generate(input_ids=prompts.input_ids[11], sampling_params=SHORT, rid="long")
        long = asyncio.ensure_future(request)
        met = await paused_while_begun(engine, mode)
        if mode == "abort":
            manager.abort_request("long")
        await manager.continue_generation(ContinueGenerationReqInput())
        return met, (await busy)["output_ids"], await long

    for _ in range(10):
        met, busy, long = engine.loop.run_until_complete(asyncio.wait_for(scenario(), 120))
        stats = engine.batch_stats()
        assert stats["free_pages"] == stats["total_pages"]
        if stats["store"]:
            assert stats["store"]["free_pages"] == stats["store"]["total_pages"]
        if met:
            return busy, long
    raise AssertionError("no pause came while a prompt was computed in part")


@pytest.mark.parametrize("store", [{}, STORE], ids=["device", "store"])
def test_a_prompt_that_is_computed_in_part_is_aborted_or_begins_anew(
    store: dict[str, Any], batch_engine: Callable[..., Any], prompts: Prompts
) -> None:
    engine = batch_engine("tiny-qwen3-moe", **MIXING, **store)
    (busy_alone,), (long_alone,) = ask(engine, prompts.input_ids[4:5], BUSY), ask(engine, prompts.input_ids[11:], SHORT)
    busy, aborted = run_with_begun(engine, prompts, "abort")
    assert busy == busy_alone
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
    assert not aborted["output_ids"]
    busy, again = run_with_begun(engine, prompts, "retract")
    assert (busy, again["output_ids"]) == (busy_alone, long_alone)
    counters = engine.batch_stats()["counters"]
    assert counters["recomputed_tokens_planned"] > 0, "what was given up"
    assert counters["recomputed_tokens_unplanned"] == 0


def test_less_than_a_page_is_refused_while_the_engine_runs(batch_engine: Callable[..., Any], prompts: Prompts) -> None:
    engine = batch_engine("tiny-qwen3-moe", **MIXING, **STORE)
    with pytest.raises(ConfigError, match=r"mix_prefill is 15, less than a page \(16 tokens\)"):
        engine.set_plan(mix_prefill=15)
    assert ask(engine, prompts.input_ids[:1], SHORT)
    assert isinstance(engine, Engine)
