"""Requests of the GPU comparison: seeded samples, and the experts of tokens that are computed again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pybase64
import pytest
from runners.routing_round import choices_of
from runners.sglang_engines import SglangRunner


class EngineStandIn:
    """Answers with one token, and as the experts of position P in layer L with [P, L]."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def generate(self, **asked: Any) -> list[dict[str, Any]]:
        self.asked = asked
        answers = []
        for tokens in asked["input_ids"]:
            start = asked.get("routed_experts_start_len", 0)
            ids = [[[position, layer] for layer in range(3)] for position in range(start, len(tokens))]
            encoded = pybase64.b64encode(np.array(ids, dtype=np.int32).tobytes()).decode()
            answers.append({"output_ids": [1], "meta_info": {"routed_experts": encoded}})
        return answers

    def shutdown(self) -> None:
        pass


@pytest.mark.parametrize(("temperature", "seeds"), [(1.0, [0, 1]), (0.0, [None, None])])
def test_each_prompt_is_sampled_from_a_seed_of_its_own_where_it_is_not_greedy(temperature, seeds):
    engine = EngineStandIn()
    assert SglangRunner(engine, {"temperature": temperature, "top_p": 0.9}).generate([[1], [2]], [4, 5]) == [[1], [1]]
    sampling = engine.asked["sampling_params"]
    assert [one.get("sampling_seed") for one in sampling] == seeds
    assert {one["temperature"] for one in sampling} == {temperature}
    assert [one["max_new_tokens"] for one in sampling] == [4, 5]


@pytest.mark.parametrize("scores_prompts", [False, True])
def test_prompts_are_scored_where_that_is_asked_for(scores_prompts):
    engine = EngineStandIn()
    SglangRunner(engine, scores_prompts=scores_prompts).generate([[1]], [4])
    given = {name: engine.asked.get(name) for name in ("return_logprob", "logprob_start_len")}
    assert given == ({"return_logprob": True, "logprob_start_len": 0} if scores_prompts else dict.fromkeys(given))


def test_experts_are_read_at_the_positions_of_decode_steps():
    engine = EngineStandIn()
    choices = choices_of(engine, [[7] * 6, [7] * 9], [[3, 5], [6, 8]], layers=3, top_k=2)
    assert engine.asked["routed_experts_start_len"] == 3
    assert engine.asked["return_routed_experts"] is True
    assert [[row[2] for row in step] for step in choices] == [[[3, 2], [6, 2]], [[5, 2], [8, 2]]]
