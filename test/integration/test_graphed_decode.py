"""Decode steps as graphs, under SGLang's attention for GPUs, on a CPU: tokens are those of the CPU's engine.

A replay runs the graph's work again, and Triton's interpreter runs its kernels. Copies and padding are as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from rerunning_graphs import RerunningGraphs
from sgl_batch import Engine
from sgl_batch.engine.process_spec import ProcessSpec

from .interpreter import TRITON, interpret_triton

# Seven sequences make a full sub-batch of four and one of three, which is padded. Later five run, without padding.
LENGTHS = (5, 21, 16, 18, 9, 3, 12)
TOKENS = (8, 8, 8, 8, 8, 5, 5)
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "page_size": 16,
    "b_moe_decode": 8,
    "b_attn_decode": 4,
    "boundary_tokens": 4,
    "max_total_tokens": 2048,
}
GRAPHS = {"disable_cuda_graph": False, "decode_graph_memory": 1 << 30}


class RerunningSpec:
    """Begins engines whose scheduler process runs the work again that a GPU would replay from a graph."""

    @staticmethod
    def begin(*args: Any) -> ProcessSpec:
        return replace(ProcessSpec.begin(*args), graphs=RerunningGraphs)


def answers(engine: Any, prompts: Any) -> list[list[int]]:
    source = max(prompts.input_ids, key=len)
    input_ids = [source[7 * index :][:length] for index, length in enumerate(LENGTHS)]
    parameters = [{"temperature": 0, "max_new_tokens": num, "ignore_eos": True} for num in TOKENS]
    return [one["output_ids"] for one in engine.generate(input_ids=input_ids, sampling_params=parameters)]


@pytest.fixture(params=["tiny-qwen3-moe"])
def family(request: Any) -> str:
    return str(request.param)


@pytest.fixture
def expected(family: str, batch_engine: Callable[..., Any], prompts: Any) -> list[list[int]]:
    """The answers of the CPU's engine, which test_parity.py compares with Hugging Face and stock SGLang."""
    return answers(batch_engine(family), prompts)


@pytest.fixture
def graphed(family: str, expected: Any, model_path: Callable[[str], str], monkeypatch: Any) -> Iterator[Any]:
    interpret_triton(monkeypatch)
    monkeypatch.setattr("sgl_batch.engine.engine.ProcessSpec", RerunningSpec)
    engine = Engine(model_path=model_path(family), **TRITON, **GRAPHS, **SETTINGS)
    yield engine
    engine.shutdown()


def test_tokens_are_those_of_eager_steps(graphed: Any, expected: Any, prompts: Any) -> None:
    assert graphed.running["classes"]["attention"] == "TritonAttention"
    assert answers(graphed, prompts) == expected
    before = graphed.batch_stats()["counters"]
    assert before["graph_replays"] > before["graphs_captured"] > 0
    assert before["graph_bytes"] > 1000 * before["graphs_captured"], (
        "each graph reports 1000 bytes, and buffers add to it"
    )
    assert answers(graphed, prompts) == expected, "all sizes are captured by now"
    after = graphed.batch_stats()["counters"]
    replayed, eager = (after[name] - before[name] for name in ("graph_replays", "eager_steps"))
    assert replayed > eager
    steps = after["decode_groups"] - before["decode_groups"]
    assert replayed + eager == steps - (after["graphs_captured"] - before["graphs_captured"]), "one replay a step"
