"""Child processes start with the environment that suits a CPU, and the parent's own stays as it was."""

from __future__ import annotations

import os

import pytest

from sgl_batch.sglang_adapter import processes
from sgl_batch.sglang_adapter.names import CPU_PLATFORM

BOUNDS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
KEYS = ("SGLANG_PLATFORM", "OMP_WAIT_POLICY", "PYTHONWARNINGS", *BOUNDS)


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for key in KEYS:
        monkeypatch.delenv(key, raising=False)


def environment() -> dict[str, str | None]:
    return {key: os.environ.get(key) for key in KEYS}


def test_children_on_a_cpu_get_the_platform_waiting_threads_and_bounded_kernel_caches():
    with processes.platform(CPU_PLATFORM):
        inside = environment()
    assert inside["SGLANG_PLATFORM"] == CPU_PLATFORM
    assert inside["OMP_WAIT_POLICY"] == "PASSIVE"
    assert inside["PYTHONWARNINGS"] == "ignore:resource_tracker:UserWarning"
    assert all(int(inside[key] or 0) in range(1, 1024) for key in BOUNDS)


@pytest.mark.parametrize("key", KEYS[1:])
def test_what_the_environment_says_stands(monkeypatch, key):
    monkeypatch.setenv(key, "7")
    with processes.platform(CPU_PLATFORM):
        assert os.environ[key] == "7"
    assert os.environ[key] == "7"


def test_the_parents_environment_is_restored_even_after_an_error():
    before = environment()
    with pytest.raises(KeyError), processes.platform(CPU_PLATFORM):
        raise KeyError
    assert environment() == before


def test_without_a_platform_nothing_changes():
    with processes.platform(None):
        assert environment() == dict.fromkeys(KEYS)
