"""On a CPU vLLM gets the cores and threads of the other engines unless the environment sets them; it is not needed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from runners.vllm_offline import VllmRunner, sampling_of, set_up_cpu

VARIABLES = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU", "LD_PRELOAD")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Cores 2, 4 and 6, and an environment at `tmp_path` in which nothing is installed."""
    for name in (*VARIABLES, "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # so that what the test's subject sets is taken back
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {6, 2, 4})
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    return tmp_path


def test_vllm_gets_every_core_that_this_process_may_use() -> None:
    set_up_cpu()
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "2,4,6"
    assert "LD_PRELOAD" not in os.environ


def test_vllm_gets_as_many_cores_as_threads_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    set_up_cpu()
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "2,4"


def test_intels_openmp_is_preloaded_where_it_is_installed(machine: Path) -> None:
    library = machine / "lib" / "libiomp5.so"
    library.parent.mkdir()
    library.touch()
    set_up_cpu()
    assert os.environ["LD_PRELOAD"] == str(library)


@pytest.mark.parametrize("name", ["VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "LD_PRELOAD"])
def test_variables_of_the_environment_are_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "7")
    set_up_cpu()
    assert os.environ[name] == "7"


def test_a_number_of_reserved_cores_leaves_the_choice_of_cores_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "1")
    set_up_cpu()
    assert "VLLM_CPU_OMP_THREADS_BIND" not in os.environ


def test_the_record_names_every_variable_that_rules_vllm() -> None:
    set_up_cpu()
    assert VllmRunner(None).details() == {name: os.environ.get(name) for name in VARIABLES}


def test_vllm_is_asked_for_log_probabilities_of_prompts_where_they_are_scored() -> None:
    assert sampling_of({"sampling": {"temperature": 0.5}}) == {"temperature": 0.5}
    assert sampling_of({"sampling": {"temperature": 0.5}, "scores_prompts": False}) == {"temperature": 0.5}
    assert sampling_of({"sampling": {}, "scores_prompts": True}) == {"prompt_logprobs": 0}
