"""The self-check of decode in a real engine measures and keeps its choice, which the next start uses."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sgl_batch import Engine

pytestmark = pytest.mark.engine

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "page_size": 16,
    "b_moe_decode": 8,
    "b_attn_decode": 3,
    "max_total_tokens": 2048,
    "decode_forward": "measure",
}
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
PROMPTS = ["Return the", "What does os.path.join do?", "The", "A list of"]


def answers(engine: Any) -> list[Any]:
    return [one["output_ids"] for one in engine.generate(PROMPTS, GREEDY)]


def test_the_next_start_uses_the_choice_that_the_self_check_kept(
    model_path: Callable[[str], str],
) -> None:
    choices = Path(os.environ["XDG_CACHE_HOME"], "sgl_batch", "start_choices")
    before = set(choices.glob("*.json"))
    engine = Engine(model_path=model_path("tiny-qwen3-moe"), **SETTINGS)
    try:
        choice = engine.plan_manifest()["choices"]["decode_forward"]
        assert engine.plan_manifest()["flags"]["decode_forward"] == "measure"
        launched = ", until the host has launched it"
        assert set(choice["numbers"]) == {"default", "sglang", f"default{launched}", f"sglang{launched}"}
        assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in choice["numbers"].values())
        assert "tokens than" not in choice["why"]
        assert "failed" not in choice["why"]
        assert engine.batch_stats()["counters"].get("decode_groups", 0) == 0
        wanted = answers(engine)
    finally:
        engine.shutdown()
    (kept,) = set(choices.glob("*.json")) - before
    content = json.loads(kept.read_text())
    assert content["choice"]["mode"] == choice["mode"]
    content["choice"] |= {"mode": "sglang", "why": "sglang: as the test says"}
    kept.write_text(json.dumps(content))

    engine = Engine(model_path=model_path("tiny-qwen3-moe"), **SETTINGS)
    try:
        again = engine.plan_manifest()["choices"]
        assert again["decode_forward"]["why"] == "sglang: as the test says (settled at an earlier start)"
        assert again == engine.batch_stats()["choices"]
        assert [again[option]["mode"] for option in ("overlap", "decode_kv")] == ["off", "resident"]
        assert "CPU" in again["attention"]["why"]
        assert answers(engine) == wanted
        counters = engine.batch_stats()["counters"]
        assert counters["forwards_by_sglang"] > 0
        assert counters.get("decode_groups", 0) == 0
        assert counters["prefill_groups"] > 0
    finally:
        engine.shutdown()
