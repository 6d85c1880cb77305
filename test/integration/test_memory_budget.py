"""A device budget sets the number of KV pages and is kept; what it cannot hold is refused with the numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sgl_batch import Engine
from sgl_batch.errors import ConfigError

from .conftest import FAMILIES

pytestmark = pytest.mark.engine

PLAN = {"b_moe_decode": 16, "b_moe_prefill": 512, "b_attn_prefill": 256, "page_size": 8, "boundary_tokens": 8}


def test_a_budget_sets_the_pages_is_kept_and_refuses_prompts_beyond_its_working_memory(
    model_path: Callable[[str], str],
) -> None:
    engine = Engine(
        model_path=model_path(FAMILIES[0]), dtype="float32", device_memory="1G", kv_store_bytes="32M", **PLAN
    )
    try:
        pages = engine.batch_stats()["total_pages"]
        page_bytes = engine.batch_stats()["store"]["page_bytes"]
        assert 100 << 20 < pages * page_bytes < 900 << 20
        sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
        answers = engine.generate(input_ids=[[5 + i] * 200 for i in range(40)], sampling_params=sampling)
        assert all(len(answer["output_ids"]) == 24 for answer in answers)
        stats = engine.batch_stats()
        assert stats["memory"]["budget_bytes"] == (1 << 30) + (32 << 20)
        assert 100 << 20 < stats["memory"]["peak_bytes"] <= stats["memory"]["budget_bytes"]
        assert stats["counters"]["recomputed_tokens_unplanned"] == 0
        with pytest.raises(
            ValueError, match=r"513 tokens, and the device's budget has working memory for groups of 512"
        ):
            engine.generate(input_ids=[5] * 513, sampling_params=sampling)
        assert engine.generate(input_ids=[5] * 512, sampling_params=sampling)["meta_info"]["completion_tokens"] == 24
        _check_changes_of_the_plan(engine)
    finally:
        engine.shutdown()


def _check_changes_of_the_plan(engine: Engine) -> None:
    """Check that groups beyond the working memory are refused and smaller ones taken; prompts fit as before."""
    with pytest.raises(ConfigError, match=r"^b_moe_prefill is 1024, and the device's budget has .* give at most 512"):
        engine.set_plan(b_moe_prefill=1024)
    assert engine.batch_stats()["plan"]["prefill"]["b_moe"] == engine.batch_config.forward.b_moe_prefill == 512
    engine.set_plan(b_moe_prefill=64, b_attn_prefill=64)
    assert engine.batch_stats()["plan"]["prefill"] == {"b_attn": 64, "b_moe": 64, "yield_option": "split"}
    sampling = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
    assert engine.generate(input_ids=[5] * 512, sampling_params=sampling)["meta_info"]["completion_tokens"] == 2
    with pytest.raises(ConfigError, match=r"^device_memory is 1073741824 and cannot become 2147483648 while the eng"):
        engine.set_plan(device_memory=2 << 30)


def test_a_budget_that_cannot_hold_the_model_is_refused_with_what_is_needed(model_path: Callable[[str], str]) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^device_memory is 200.00 MiB, and .* are needed: the program .*, weights "
        r"13.* MiB, groups of 512 prompt tokens .* 2 pages of KV for each of 16 running sequences .*; "
        r"raise --device-memory",
    ):
        Engine(model_path=model_path(FAMILIES[0]), dtype="float32", device_memory="200M", **PLAN)
