"""What ranks have written together is each rank's own from then on, whatever another rank does or however it ends.

Ranks are threads of this process. One that dies is a process.
"""

from __future__ import annotations

import itertools
import logging
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from arena_process import joined, rank_that_writes_and_dies
from gloo_pairs import gloo_groups

from sgl_batch.distributed import shared_arena as module
from sgl_batch.distributed.rank_cores import Cpu
from sgl_batch.distributed.shared_arena import SharedArena, padded, shared_arena

T = TypeVar("T")

NUMBERS = 3_000_000
ROOM = padded(4 * NUMBERS)


def on_all(ranks: list[T], do: Callable[[T], object]) -> list[object]:
    """Call `do` with all ranks at once, as they wait for each other."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(do, ranks))


def arenas(number: int = 2) -> list[SharedArena | None]:
    return on_all(gloo_groups(number), lambda group: shared_arena(group, ROOM))  # type: ignore[return-value]


def written_together() -> tuple[list[SharedArena], list[torch.Tensor]]:
    """Two ranks' arenas, and a tensor at the same place in each, to which each has written one half."""
    both = [one for one in arenas() if one is not None]
    tensors = [arena.empty((2, NUMBERS // 2), torch.int32) for arena in both]
    for rank, tensor in enumerate(tensors):
        tensor[rank] = rank + 1
    return both, tensors


def test_what_one_rank_writes_all_have_until_they_keep_it_apart():
    both, tensors = written_together()
    assert all(tensor.unique_consecutive().tolist() == [1, 2] for tensor in tensors)
    on_all(both, SharedArena.seal)
    tensors[0][1, 5] = 9
    assert tensors[0][1, 5] == 9
    assert tensors[1].unique_consecutive().tolist() == [1, 2]


def test_what_is_kept_apart_counts_as_resident_before_it_is_read():
    def resident_kb() -> int:
        parts = Path("/proc/self/smaps").read_text(encoding="utf-8").split("memfd:sgl-batch-weights")[1:]
        return sum(int(part.partition("\nRss:")[2].split()[0]) for part in parts)

    both, _ = written_together()
    on_all(both, SharedArena.seal)
    assert resident_kb() >= 2 * 4 * NUMBERS // 1024


def test_a_rank_with_its_own_copy_has_the_same_at_the_same_addresses():
    both, tensors = written_together()
    on_all(both, SharedArena.seal)
    both[0].make_own()
    assert torch.equal(*tensors)
    tensors[0].zero_()
    assert tensors[1].unique_consecutive().tolist() == [1, 2]
    assert tensors[0] in both[0]


def test_the_shared_memory_is_given_back_when_no_rank_shares_it():
    def is_mapped() -> bool:
        return "sgl-batch-weights" in Path("/proc/self/maps").read_text(encoding="utf-8")

    both, _ = written_together()
    on_all(both, SharedArena.seal)
    both[0].make_own()
    assert is_mapped()
    both[1].make_own()
    assert not is_mapped()


def test_memory_that_is_not_needed_any_more_is_given_back_for_all():
    both, tensors = written_together()
    before = both[1].num_bytes
    both[0].release(tensors[0][0])
    assert both[1].num_bytes <= before - 2 * NUMBERS + 2 * 4096
    assert (tensors[1][1] == 2).all()


def test_work_is_dealt_to_the_rank_that_has_least_of_it():
    both = [one for one in arenas() if one is not None]
    assert [[arena.takes(amount) for amount in (5, 2, 2, 2)] for arena in both] == [
        [True, False, False, False],
        [False, True, True, True],
    ]


def test_a_lone_rank_shares_nothing():
    assert arenas(1) == [None]


def test_only_ranks_at_the_same_memory_share(monkeypatch):
    nodes = iter((0, 1, 1))
    monkeypatch.setattr(module, "read_cpus", lambda _: [Cpu(socket=0, node=next(nodes), core=0, number=0)])
    three = [one for one in arenas(3) if one is not None]
    assert sorted(one.num_sharers for one in three) == [1, 2, 2]
    on_all(three, SharedArena.seal)


def test_nothing_is_shared_where_each_rank_is_at_other_memory(monkeypatch):
    nodes = iter((0, 1))
    monkeypatch.setattr(module, "read_cpus", lambda _: [Cpu(socket=0, node=next(nodes), core=0, number=0)])
    assert arenas() == [None, None]


def test_where_a_rank_cannot_map_the_memory_no_rank_shares_it(monkeypatch, caplog):
    tries = itertools.count()

    def map_once(*args: object, **kwargs: object) -> None:
        if next(tries):
            raise OSError("no address space")

    monkeypatch.setattr(module, "map_file", map_once)
    with caplog.at_level(logging.WARNING):
        assert arenas() == [None, None]
    assert "each rank holds all weights" in caplog.text
    assert "no address space" in caplog.text


def test_what_a_rank_has_written_outlives_it(tmp_path):
    store = str(tmp_path / "store")
    with rank_that_writes_and_dies(store) as process:
        arena, tensor = joined(store, 1)
        arena.seal()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        assert (tensor == 3).all()
