"""The runner that is asked for computes the experts of a running engine, and the tokens stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.engine

REQUEST = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
PROMPTS = ["Return the", "What does os.path.join do?"]


@pytest.mark.parametrize(("runner", "family"), [("torch", "tiny-mixtral"), ("triton", "tiny-qwen3-moe")])
def test_a_runner_that_is_asked_for_computes_the_same_tokens(
    runner: str, family: str, batch_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    native = batch_engine(family)
    assert native.plan_manifest()["expert_runner"] == "native"
    expected = [answer["text"] for answer in native.generate(PROMPTS, REQUEST)]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    other = batch_engine(family, expert_runner=runner)
    assert other.plan_manifest()["expert_runner"] == runner
    assert [answer["text"] for answer in other.generate(PROMPTS, REQUEST)] == expected
    assert other.batch_stats()["counters"]["expert_calls"] > 0
