"""Prompts that decode steps compute chunk by chunk can be aborted or retracted at any point."""

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

# No prefill group begins while a sequence runs.
MIXING = {"mix_prefill": 16, "b_moe_prefill": 64, "ready_ahead": 0.0, "refill_watermark": 0.0}
STORE = {"kv_store_bytes": 16 << 20, "decode_kv": "resident", "max_total_tokens": 1280}
BUSY = {"temperature": 0, "max_new_tokens": 300, "ignore_eos": True}
SHORT = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}


async def pause_in_the_middle_of_a_prompt(engine: Any, mode: str) -> bool:
    """Pause while a prompt is partly computed. Return whether it still is when the engine has paused."""
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


def run_and_interrupt_a_prompt(engine: Any, prompts: Prompts, mode: str) -> tuple[list[int], dict[str, Any]]:
    """Return the tokens of a sequence that decodes, and the answer to a long prompt that a pause interrupts."""
    manager = engine.tokenizer_manager

    async def scenario() -> tuple[bool, Any, Any]:
        busy = asyncio.ensure_future(engine.async_generate(input_ids=prompts.input_ids[4], sampling_params=BUSY))
        while "RUNNING" not in (await states(engine))[0]["sequences"]:
            await asyncio.sleep(0.001)
        request = engine.async_generate(input_ids=prompts.input_ids[11], sampling_params=SHORT, rid="long")
        long = asyncio.ensure_future(request)
        interrupted = await pause_in_the_middle_of_a_prompt(engine, mode)
        if mode == "abort":
            manager.abort_request("long")
        await manager.continue_generation(ContinueGenerationReqInput())
        return interrupted, (await busy)["output_ids"], await long

    for _ in range(10):
        interrupted, busy, long = engine.loop.run_until_complete(asyncio.wait_for(scenario(), 120))
        stats = engine.batch_stats()
        assert stats["free_pages"] == stats["total_pages"]
        if stats["store"]:
            assert stats["store"]["free_pages"] == stats["store"]["total_pages"]
        if interrupted:
            return busy, long
    raise AssertionError("no pause came while a prompt was computed in part")


@pytest.mark.parametrize("store", [{}, STORE], ids=["device", "store"])
def test_a_partly_computed_prompt_is_aborted_or_computed_again(
    store: dict[str, Any], batch_engine: Callable[..., Any], prompts: Prompts
) -> None:
    engine = batch_engine("tiny-qwen3-moe", **MIXING, **store)
    (busy_alone,), (long_alone,) = ask(engine, prompts.input_ids[4:5], BUSY), ask(engine, prompts.input_ids[11:], SHORT)
    busy, aborted = run_and_interrupt_a_prompt(engine, prompts, "abort")
    assert busy == busy_alone
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
    assert not aborted["output_ids"]
    busy, again = run_and_interrupt_a_prompt(engine, prompts, "retract")
    assert (busy, again["output_ids"]) == (busy_alone, long_alone)
    counters = engine.batch_stats()["counters"]
    assert counters["recomputed_tokens_planned"] > 0, "the interrupted prompt is computed again"
    assert counters["recomputed_tokens_unplanned"] == 0


def test_mix_prefill_below_one_page_is_refused_while_the_engine_runs(
    batch_engine: Callable[..., Any], prompts: Prompts
) -> None:
    engine = batch_engine("tiny-qwen3-moe", **MIXING, **STORE)
    with pytest.raises(ConfigError, match=r"mix_prefill is 15, less than a page \(16 tokens\)"):
        engine.set_plan(mix_prefill=15)
    assert ask(engine, prompts.input_ids[:1], SHORT)
    assert isinstance(engine, Engine)
