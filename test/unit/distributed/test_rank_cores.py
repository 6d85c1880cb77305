"""Ranks get whole physical cores however these are numbered, and one CPU each where there are few."""

from __future__ import annotations

import pytest

from sgl_batch.distributed.rank_cores import Cpu, read_cpus, share_of


def machine(sockets, cores_each, threads):
    """CPUs as Linux numbers them: the first thread of every core of every socket, then the second ones."""
    cores = sockets * cores_each
    return [
        Cpu(socket=core // cores_each, node=core // cores_each, core=core, number=core + thread * cores)
        for thread in range(threads)
        for core in range(cores)
    ]


def shares(cpus, world_size):
    return [share_of(cpus, rank, world_size) for rank in range(world_size)]


def test_two_ranks_of_two_sockets_get_a_socket_each_with_both_threads_of_its_cores():
    assert shares(machine(2, 2, 2), 2) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert shares(machine(2, 2, 2), 4) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_no_core_is_shared_or_left_over_where_there_is_one_for_each_rank():
    for world_size in range(1, 8):
        found = shares(machine(1, 7, 2), world_size)
        assert sorted(number for share in found for number in share) == list(range(14))
        assert {number % 7 for number in found[0]}.isdisjoint(number % 7 for share in found[1:] for number in share)
        assert max(map(len, found)) - min(map(len, found)) <= 2


def test_ranks_share_a_core_s_threads_before_they_share_a_thread():
    assert shares(machine(1, 1, 2), 2) == [[0], [1]]
    assert shares(machine(1, 2, 1), 4) == [[0], [0], [1], [1]]


def test_ranks_get_whole_sockets_however_cores_are_numbered():
    """Some machines number the cores of their sockets in turn."""
    cpus = [Cpu(socket=number % 2, node=number % 2, core=number, number=number) for number in range(4)]
    assert shares(cpus, 2) == [[0, 2], [1, 3]]


@pytest.mark.parametrize("siblings", ["0,4", "0-1"])
def test_the_location_of_a_cpu_is_read_from_sysfs(tmp_path, siblings):
    topology = tmp_path / "cpu4" / "topology"
    topology.mkdir(parents=True)
    (topology / "thread_siblings_list").write_text(f"{siblings}\n")
    (topology / "physical_package_id").write_text("1\n")
    (tmp_path / "cpu4" / "node3").mkdir()
    assert read_cpus([4], tmp_path) == [Cpu(socket=1, node=3, core=0, number=4)]


def test_cpus_unknown_to_sysfs_count_as_cores_of_one_socket(tmp_path):
    assert shares(read_cpus([5, 2], tmp_path), 2) == [[2], [5]]
