"""An engine's fork server starts early only in a program that leaves a core free and that may fork."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable

import pytest

from sgl_batch.engine import head_start
from sgl_batch.engine.process_spec import ProcessSpec
from sgl_batch.sglang_adapter.names import CPU_PLATFORM

Change = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Return the list to which the modules of each server that starts are added, as on a machine where one does."""
    found: list[tuple[str, ...]] = []
    monkeypatch.setattr(head_start, "begin_fork_server", lambda _name, modules: found.append(modules))
    monkeypatch.setattr(head_start, "has_gpu_driver", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    monkeypatch.delitem(sys.modules, head_start._ENGINE, raising=False)
    return found


def test_the_server_imports_what_the_engines_own_would(started: list[tuple[str, ...]]) -> None:
    head_start.begin_fork_server_early()
    assert started == [ProcessSpec.preloaded]


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setitem(sys.modules, head_start._ENGINE, head_start),
        lambda patch: patch.setattr(multiprocessing, "parent_process", lambda: "the parent"),
        lambda patch: patch.setattr(os, "sched_getaffinity", lambda _: {0}),
        lambda patch: patch.setattr(head_start, "has_gpu_driver", lambda: True),
        lambda patch: patch.setenv("SGLANG_PLATFORM", CPU_PLATFORM),
    ],
    ids=["the engine is imported", "a child process", "a single core", "a GPU's driver", "a program that forks"],
)
def test_no_server_starts_early(
    started: list[tuple[str, ...]], change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch)
    head_start.begin_fork_server_early()
    assert started == []
