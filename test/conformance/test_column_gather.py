"""Every gather of columns brings the same matrix to all ranks, and waits for each."""

from __future__ import annotations

import pytest
from gather_work import differ, gather_all, keep_what_was_gathered
from rank_processes import Implementation, ProcessCache, Ranks

MEMBERS = [(0,), (0, 1), (0, 1, 2, 3), (1, 3)]
IMPLEMENTATIONS = [
    Implementation(name=name, num_processes=4 if max(members) > 1 else len(members), members=members)
    for name in ("shared", "gloo")
    for members in MEMBERS
]


@pytest.fixture
def ranks(request: pytest.FixtureRequest, process_cache: ProcessCache) -> Ranks:
    return process_cache.ranks(request.param)


@pytest.mark.parametrize("ranks", IMPLEMENTATIONS, ids=str, indirect=True)
def test_every_rank_gets_the_columns_of_all_side_by_side(ranks: Ranks) -> None:
    assert ranks.call(gather_all) == [[]] * ranks.implementation.world_size


@pytest.mark.parametrize("ranks", IMPLEMENTATIONS, ids=str, indirect=True)
def test_a_gathered_matrix_is_the_callers(ranks: Ranks) -> None:
    assert all(ranks.call(keep_what_was_gathered))


@pytest.mark.parametrize(
    "ranks", [each for each in IMPLEMENTATIONS if each.name == "shared" and each.world_size > 1], ids=str, indirect=True
)
def test_matrices_that_differ_are_refused_on_all_ranks(ranks: Ranks) -> None:
    assert all("all ranks must give the same" in error for error in ranks.call(differ))
