"""In each round of an all-gather, every rank reads the values of this round, however unevenly the ranks arrive."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import sgl_batch_kernel
import torch

from sgl_batch.distributed.shared_memory_all_gather import ALL_GATHER_BYTES, SharedMemoryAllGather


def all_gathers_of(num_ranks: int, *, timeout_s: float = 10.0) -> list[SharedMemoryAllGather]:
    regions = [torch.zeros(ALL_GATHER_BYTES, dtype=torch.uint8) for _ in range(num_ranks)]
    return [SharedMemoryAllGather(regions, rank, sgl_batch_kernel, timeout_s=timeout_s) for rank in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_every_rank_reads_all_values_of_each_round(num_ranks):
    rounds = 200
    all_gathers = all_gathers_of(num_ranks)

    def rank_reads(rank: int) -> list[list[list[int]]]:
        draw = random.Random(rank)
        found = []
        for number in range(rounds):
            if draw.random() < 0.1:
                time.sleep(0.002 * draw.random())  # the ranks arrive at different times
            found.append(all_gathers[rank].gather([rank, number, -number * rank]))
        return found

    with ThreadPoolExecutor(num_ranks) as pool:
        for found in pool.map(rank_reads, range(num_ranks)):
            for number, rows in enumerate(found):
                assert rows == [[rank, number, -number * rank] for rank in range(num_ranks)]


def test_a_rank_that_does_not_take_part_is_named():
    first, *_ = all_gathers_of(3, timeout_s=0.05)
    with pytest.raises(RuntimeError, match=r"rank 1 of the group did not take part in an exchange in 0\.05 s"):
        first.gather([1])


def test_the_time_waited_for_others_is_returned_once():
    first, second = all_gathers_of(2)
    begun = time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.gather, [1])
        time.sleep(0.05)
        second.gather([2])
        waiting.result()
    passed = time.perf_counter() - begun
    assert 0.0 < first.take_waited_s() <= passed
    assert first.take_waited_s() == 0.0


def test_more_than_16_values_are_refused():
    with pytest.raises(RuntimeError, match="17 values to gather; at most 16"):
        all_gathers_of(1)[0].gather(range(17))
