"""A start that fails ends what it has started, and nothing else of the process."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess

import pytest

from sgl_batch.config import from_mapping
from sgl_batch.errors import ConfigError, EngineError
from sgl_batch.managers import launch
from sgl_batch.managers.launch import sglang_arguments, start_errors

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def start_child() -> Iterator[Callable[[], BaseProcess]]:
    """Starts child processes that live until somebody ends them, as an engine's do."""
    children: list[BaseProcess] = []

    def start() -> BaseProcess:
        child = SPAWN.Process(target=time.sleep, args=(600,))
        child.start()
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.join()


@pytest.mark.parametrize(
    ("error", "becomes"),
    [(RuntimeError("no memory"), EngineError), (KeyboardInterrupt(), KeyboardInterrupt), (OSError(), OSError)],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_a_start_that_fails_ends_its_own_children_and_no_others(error, becomes, start_child):
    another = start_child()
    own = []

    def start_engine():
        with start_errors():
            own.append(start_child())
            raise error

    with pytest.raises(becomes):
        start_engine()
    assert not own[0].is_alive()
    assert another.is_alive()


def test_a_start_that_succeeds_ends_nobody(start_child):
    with start_errors():
        child = start_child()
    assert child.is_alive()


def test_the_error_says_that_the_engine_did_not_start_and_why():
    with pytest.raises(EngineError, match="the engine did not start: no memory"), start_errors():
        raise RuntimeError("no memory")


def test_a_start_that_fails_gives_back_the_handler_by_which_another_engine_learns_of_a_childs_death():
    def handler(*_: object) -> None:
        """Another engine's."""

    def start_engine() -> None:
        with start_errors():
            signal.signal(signal.SIGQUIT, signal.SIG_IGN)
            raise RuntimeError("no memory")

    before = signal.signal(signal.SIGQUIT, handler)
    try:
        with pytest.raises(EngineError):
            start_engine()
        assert signal.getsignal(signal.SIGQUIT) is handler
    finally:
        signal.signal(signal.SIGQUIT, before)


INT8 = {"cpu_weight_dtype": "int8"}


@pytest.mark.parametrize(
    ("options", "on_cpu", "kernels", "message"),
    [
        (INT8, False, object(), "is for a CPU: leave it out, and see SGLang's --quantization"),
        (INT8, True, None, "the native kernels are not there: run scripts/install"),
        (
            {**INT8, "expert_runner": "torch"},
            True,
            object(),
            "expert_runner 'torch' takes no such weights: choose native",
        ),
    ],
)
def test_rounded_weights_are_refused_where_nothing_can_multiply_them(options, on_cpu, kernels, message, monkeypatch):
    monkeypatch.setattr(launch, "on_cpu", lambda kwargs: on_cpu)
    monkeypatch.setattr(launch, "native_kernels", lambda: kernels)
    with pytest.raises(ConfigError, match=f"cpu_weight_dtype is 'int8'.*{message}"):
        sglang_arguments({}, from_mapping(options))


@pytest.mark.parametrize(
    ("options", "arguments", "on_cpu", "message"),
    [
        ({"kv_store_dir": "d"}, {}, True, "kv_store_dir is given without a size: say kv_store_bytes too"),
        ({"kv_store_bytes": 9}, {}, False, "kv_store_bytes is 9; the host KV store has no form for GPUs yet"),
        (
            {"kv_store_bytes": 9},
            {"tp_size": 2, "dp_size": 2, "ep_size": 2, "enable_dp_attention": True},
            True,
            "kv_store_bytes is 9; several ranks have no host KV store yet",
        ),
    ],
)
def test_a_store_is_refused_where_it_has_no_form(options, arguments, on_cpu, message, monkeypatch):
    monkeypatch.setattr(launch, "on_cpu", lambda kwargs: on_cpu)
    with pytest.raises(ConfigError, match=message):
        sglang_arguments(arguments, from_mapping(options))
