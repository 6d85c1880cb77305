"""Engines of all families, few alive at a time, and Hugging Face's answers to the same prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_batch import Engine
from sgl_batch.config import ForwardConfig
from sgl_batch.core.replay import replay_trace
from sgl_batch.managers.rank_callbacks import find_callback
from sgl_batch.sglang_adapter import fork_server
from sgl_batch.sglang_adapter.stock_engine import StockEngine

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from bringup.prompts import PROMPT_LENGTHS, Requests, questions, reference_of_transformers

FAMILIES = ("tiny-qwen3-moe", "tiny-mixtral", "tiny-deepseek-v3")


@dataclass(frozen=True)
class Prompts:
    """Token ids of prompts, and the sampling parameters that make each greedy and of a set length."""

    input_ids: list[list[int]]
    sampling_params: list[dict[str, Any]]


@pytest.fixture(scope="session", autouse=True)
def _keep_fork_servers() -> Iterator[None]:
    """Keep the fork server of every environment until the test process ends: a new one takes ten seconds.

    Tests change the environment, for an instruction set or Triton's interpreter, and change it back.
    """
    with fork_server.keeping_servers():
        yield


@pytest.fixture(scope="session")
def model_path(repo_root: Path) -> Callable[[str], str]:
    return lambda family: str(repo_root / "test" / "models" / family)


@pytest.fixture(scope="session")
def prompts(model_path: Callable[[str], str]) -> Prompts:
    """Return real questions of mixed lengths, cut from the sample that ships with the tests."""
    requests = questions(Path(model_path(FAMILIES[0])))
    assert [len(ids) for ids in requests.input_ids] == list(PROMPT_LENGTHS)
    return Prompts(requests.input_ids, requests.sampling_params)


class EngineCache:
    """Keeps the two engines used last: starting one takes many seconds, and an idle one costs only memory."""

    def __init__(self, traces: Traces) -> None:
        self._engines: dict[str, Any] = {}
        self._traces = traces

    def get(self, kind: type[Any], **kwargs: Any) -> Any:
        key = f"{kind.__name__} {sorted(kwargs.items())}"
        engine = self._engines.pop(key, None)
        if engine is None:
            for oldest in list(self._engines)[:-1]:
                self._engines.pop(oldest).shutdown()
            engine = kind(**{**(self._traces.new() if kind is Engine else {}), **kwargs})
        self._engines[key] = engine
        return engine

    def close(self) -> None:
        for engine in self._engines.values():
            engine.shutdown()
        self._engines.clear()


class Traces:
    """Trace files of engines. Every decision in them must replay to the same actions."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._files = directory, list[Path]()

    def new(self) -> dict[str, str]:
        """Return the argument that makes an engine write a new trace file."""
        self._files.append(self._directory / f"trace-{len(self._files)}.jsonl")
        return {"trace_file": str(self._files[-1])}

    def check(self) -> None:
        """Replay the decisions of the engines, which have ended."""
        for path in self._files:
            if not path.exists():  # the engine did not start, or writes another file
                continue
            with path.open() as lines:
                number, differences = replay_trace((json.loads(line) for line in lines), find_callback)
            assert number > 0, f"{path} holds no decision"
            assert differences == []


@pytest.fixture(scope="session")
def engine_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCache]:
    traces = Traces(tmp_path_factory.mktemp("cache-traces"))
    engine_cache = EngineCache(traces)
    yield engine_cache
    engine_cache.close()
    traces.check()


@pytest.fixture
def traces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traces]:
    """Trace files of engines that end before this fixture does."""
    made = Traces(tmp_path_factory.mktemp("traces"))
    yield made
    made.check()


@pytest.fixture
def started(traces: Traces) -> Iterator[Callable[..., Any]]:
    """Return a function that starts engines which end with the test."""
    engines: list[Any] = []

    def start(**kwargs: Any) -> Any:
        engines.append(Engine(**traces.new(), **kwargs))
        return engines[-1]

    yield start
    for engine in engines:
        engine.shutdown()


@pytest.fixture(scope="session")
def batch_engine(engine_cache: EngineCache, model_path: Callable[[str], str]) -> Callable[..., Any]:
    """Return a function that starts our engine with small pages and groups, so that sequences span several of each.

    Engines that differ only in `b_attn` are one engine whose plan is changed.
    """

    def start(family: str, b_attn: int | None = None, **kwargs: Any) -> Any:
        settings = {
            "dtype": "float32",
            "page_size": 16,
            "b_moe_prefill": 700,
            "b_moe_decode": 8,
            "boundary_tokens": 8,
            "max_total_tokens": 16384,
        }
        engine = engine_cache.get(Engine, model_path=model_path(family), **{**settings, **kwargs})
        plain = ForwardConfig()
        engine.set_plan(b_attn_prefill=b_attn or plain.b_attn_prefill, b_attn_decode=b_attn or plain.b_attn_decode)
        return engine

    return start


@pytest.fixture(scope="session")
def stock_engine(engine_cache: EngineCache, model_path: Callable[[str], str]) -> Callable[..., Any]:
    def start(family: str, **kwargs: Any) -> Any:
        settings = {"dtype": "float32", "max_total_tokens": 16384, "disable_radix_cache": True, "sleep_on_idle": True}
        return engine_cache.get(StockEngine, model_path=model_path(family), **{**settings, **kwargs})

    return start


@dataclass(frozen=True)
class Reference:
    """Greedy tokens of Hugging Face transformers, and the gap between its two best logits at each of them."""

    tokens: list[list[int]]
    gaps: list[list[float]]


@pytest.fixture(scope="session")
def reference(prompts: Prompts, model_path: Callable[[str], str]) -> Callable[[str, str], Reference]:
    made: dict[tuple[str, str], Reference] = {}

    def make(family: str, dtype: str) -> Reference:
        if (family, dtype) not in made:
            made[family, dtype] = greedy_reference(model_path(family), getattr(torch, dtype), prompts)
        return made[family, dtype]

    return make


def greedy_reference(path: str, dtype: torch.dtype, prompts: Prompts) -> Reference:
    """Return the reference of one checkpoint. It runs one prompt at a time, so that nothing is padded."""
    lengths = [parameters["max_new_tokens"] for parameters in prompts.sampling_params]
    requests = Requests(prompts.input_ids, lengths)
    made = reference_of_transformers(Path(path), str(dtype).removeprefix("torch."), requests)
    gaps = [[first[1] - second[1] for first, second, *_ in steps] for steps in made.best]
    return Reference(made.tokens, gaps)
