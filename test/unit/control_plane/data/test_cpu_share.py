"""Engines of one node never get the same CPU, and an engine's threads are as many as the CPUs that it asked for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from sgl_batch.control_plane.data.cpu_share import CpuShare, share_of_actor


@pytest.fixture
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})


@pytest.mark.usefixtures("four_cpus")
def test_two_engines_get_different_cpus_and_a_third_is_bound_to_none(tmp_path: Path) -> None:
    first, second = CpuShare.claim(2, tmp_path), CpuShare.claim(2, tmp_path)
    assert len(first.cpus) == len(second.cpus) == 2
    assert set(first.cpus).isdisjoint(second.cpus)
    third = CpuShare.claim(2, tmp_path)
    assert (third.cpus, third.threads) == ((), 2)
    first.release()
    assert CpuShare.claim(2, tmp_path).cpus == first.cpus


@pytest.mark.usefixtures("four_cpus")
def test_a_claim_that_fails_keeps_no_cpu(tmp_path: Path) -> None:
    taken = CpuShare.claim(3, tmp_path)
    assert CpuShare.claim(2, tmp_path).cpus == ()
    assert CpuShare.claim(1, tmp_path).cpus != ()
    taken.release()


@pytest.mark.usefixtures("four_cpus")
def test_an_engine_that_asks_for_the_whole_node_is_not_bound(tmp_path: Path) -> None:
    share = CpuShare.claim(8, tmp_path)
    assert (share.cpus, share.threads) == ((), 4)


def test_the_thread_that_binds_itself_and_its_environment_have_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    whole = os.sched_getaffinity(0)
    one = min(whole)
    share = CpuShare(cpus=(one,), threads=3)
    seen: list[set[int]] = []

    def bind() -> None:
        share.bind()
        seen.append(os.sched_getaffinity(0))

    in_thread(bind)
    assert seen == [{one}]
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert os.sched_getaffinity(0) == whole


def test_an_actor_with_a_gpu_is_not_bound_and_a_fraction_of_a_cpu_is_one_thread() -> None:
    assert share_of_actor({"CPU": 4.0, "GPU": 1.0}) is None
    share = share_of_actor({"CPU": 0.5})
    assert share is not None
    share.release()
    assert share.threads == 1


def in_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
