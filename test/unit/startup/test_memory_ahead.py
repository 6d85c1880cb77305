"""Memory is taken ahead for weights that are worth it, on a machine that will have them in its memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from sgl_batch.startup import memory_ahead
from sgl_batch.startup.memory_ahead import bytes_ahead

_MIB, _GIB = 1 << 20, 1 << 30


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(memory_ahead, "has_gpu_driver", lambda: False)


def _files(directory: Path, sizes: Sequence[int]) -> list[Path]:
    files = [directory / f"model-{number}.safetensors" for number in range(len(sizes))]
    for file, size in zip(files, sizes, strict=True):
        with file.open("wb") as opened:
            opened.truncate(size)
    return files


def _free() -> int:
    return 20 * _GIB


@pytest.mark.parametrize(
    ("sizes", "ahead"),
    [
        ([3 * _GIB, _GIB], 5 * _GIB),
        ([300 * _MIB], 600 * _MIB),
        ([255 * _MIB], 0),
        ([30 * _GIB], 10 * _GIB),
        ([], 0),
    ],
    ids=["and a gibibyte", "a small model", "too small", "half of what is free", "no files"],
)
def test_it_is_that_of_the_weights_and_what_comes_with_them(tmp_path: Path, sizes: list[int], ahead: int) -> None:
    assert bytes_ahead(_files(tmp_path, sizes), free=_free) == ahead


def test_a_single_core_imports_and_has_no_time_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert bytes_ahead(_files(tmp_path, [_GIB]), free=_free) == 0


@pytest.mark.parametrize(("on_cpu", "ahead"), [(False, 0), (True, 2 * _GIB)])
def test_on_a_gpus_machine_only_an_engine_that_is_told_to_runs_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, on_cpu: bool, ahead: int
) -> None:
    monkeypatch.setattr(memory_ahead, "has_gpu_driver", lambda: True)
    assert bytes_ahead(_files(tmp_path, [_GIB]), on_cpu=on_cpu, free=_free) == ahead


def test_what_cannot_be_known_fails_no_start(tmp_path: Path) -> None:
    def fail() -> int:
        raise OSError("no /proc")

    assert bytes_ahead([tmp_path / "missing.safetensors"], free=_free) == 0
    assert bytes_ahead(_files(tmp_path, [_GIB]), free=fail) == 0
