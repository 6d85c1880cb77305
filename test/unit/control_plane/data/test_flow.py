"""How many rows, CPUs and GPUs an engine of Ray Data's gets, and which runs are refused before they wait for ever."""

from __future__ import annotations

from typing import Any

import pytest

from sgl_batch.control_plane.data.flow import Need, check_fits, cpus_for, flow_for, gpus_of
from sgl_batch.errors import ConfigError


@pytest.mark.parametrize("group", [1, 16, 256, 1000])
@pytest.mark.parametrize("given", [{}, {"batch_size": 32}, {"batches": 3}])
def test_at_least_two_groups_of_the_engine_are_in_flight(group: int, given: dict[str, int]) -> None:
    flow = flow_for(group, **given)
    assert flow.rows >= 2 * group
    assert all(getattr(flow, "batch_size" if name == "batch_size" else name) == value for name, value in given.items())


def test_sizes_that_leave_the_group_short_are_refused_with_one_that_does_not() -> None:
    assert flow_for(256, 64, 4).rows == 256
    with pytest.raises(
        ConfigError, match=r"32 times max_concurrent_batches 4 is 128 rows.*256.*at least batch_size 64"
    ):
        flow_for(256, 32, 4)


@pytest.mark.parametrize(
    ("kwargs", "gpus"),
    [
        ({}, 1),
        ({"tp_size": 4, "dp_size": 4, "ep_size": 4}, 4),
        ({"tp_size": 2, "pp_size": 2}, 4),
        ({"tp_size": None}, 1),
    ],
)
def test_data_parallel_ranks_are_among_the_tensor_parallel_gpus(kwargs: dict[str, Any], gpus: int) -> None:
    assert gpus_of(kwargs, on_gpu=True) == gpus
    assert gpus_of(kwargs, on_gpu=False) == 0


@pytest.mark.parametrize(
    ("nodes", "engines", "resumes", "cpus"),
    [
        ([8], 1, False, 7),
        ([8], 1, True, 6),
        ([8, 8], 2, True, 7),
        ([8, 8], 4, False, 3),
        ([2, 16], 1, True, 16),
        ([1], 1, False, 1),
        ([], 1, False, 1),
    ],
)
def test_engines_get_the_most_cpus_that_leave_enough_for_other_work(
    nodes: list[int], engines: int, resumes: bool, cpus: int
) -> None:
    assert cpus_for([{"CPU": float(node)} for node in nodes], engines, resumes=resumes) == cpus


@pytest.mark.parametrize(
    ("nodes", "need", "words"),
    [
        ([{"CPU": 2.0}], Need(engines=1, cpus=4), r"1 engine\(s\) of 4 CPUs do not fit"),
        ([{"CPU": 8.0, "GPU": 1.0}], Need(engines=1, cpus=1, gpus=2), "2 GPUs do not fit"),
        ([{"CPU": 4.0}], Need(engines=1, cpus=4), "leave 0 of the cluster's 4 CPUs, and reads and writes take 1"),
        ([{"CPU": 4.0}], Need(engines=1, cpus=3, resumes=True), "filter of the checkpoint take 2.*wait for ever"),
        ([{"GPU": 8.0}], Need(engines=1, cpus=1, gpus=1), "do not fit"),
    ],
)
def test_a_run_that_would_wait_for_ever_is_refused_with_the_numbers(
    nodes: list[dict[str, float]], need: Need, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_fits(nodes, need)


def test_a_run_that_fits_passes() -> None:
    check_fits([{"CPU": 4.0}], Need(engines=1, cpus=2, resumes=True))
    check_fits([{"CPU": 4.0, "GPU": 2.0}, {"CPU": 1.0}], Need(engines=2, cpus=1, gpus=1))
