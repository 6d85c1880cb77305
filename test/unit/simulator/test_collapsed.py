"""One simulated rank that stands for others of the same lengths takes as long as all of them."""

from __future__ import annotations

import numpy as np
import pytest
from linear_costs import LinearCosts, plan

from sgl_batch.planner.candidate import DEVICE
from sgl_batch.simulator.collapsed import Collapsed
from sgl_batch.simulator.instance import Instance
from sgl_batch.simulator.kv_forms import RankPages, make_form
from sgl_batch.simulator.rank import SimulatedRank
from sgl_batch.simulator.requests import Requests
from sgl_batch.simulator.scheduler import Ours
from sgl_batch.simulator.work import PassWork

_KINDS, _ALIKE, _OF_RANK = 8, 8, 12


def _seconds(copies: int, stands_for: int) -> float:
    """Return the seconds of ranks of _KINDS kinds, with so many of each, of which each stands for so many."""
    draw = np.random.default_rng(3)
    lengths = np.repeat(draw.integers(1, 100, (_OF_RANK, _KINDS, 2)), copies, axis=1).reshape(-1, 2)
    asked = Requests(prompts=lengths[:, 0], outputs=lengths[:, 1], most=lengths[:, 1])
    the_plan, count = plan(chunk=256, rows=8), _KINDS * copies
    ranks = [
        SimulatedRank(
            asked,
            range(rank, len(lengths), count),
            the_plan,
            make_form(DEVICE, RankPages(device=300), the_plan.page_size),
            request_slots=64,
        )
        for rank in range(count)
    ]
    costs = Collapsed(LinearCosts(), stands_for)
    account = Instance(ranks, the_plan, Ours(ranks[0].form.policy), costs).run()
    assert sum(rank.tally.finished for rank in ranks) == len(lengths)
    return account.seconds


def test_one_of_eight_ranks_of_the_same_lengths_takes_as_long_as_all_64():
    assert _seconds(1, _ALIKE) == pytest.approx(_seconds(_ALIKE, 1), rel=0.01)


def test_experts_have_the_rows_of_all_ranks_and_attention_those_of_one():
    work = PassWork(rows=10, kv_tokens=500, all_rows=25)
    one, all_of_them = LinearCosts(), LinearCosts()
    Collapsed(all_of_them, 4).of_pass(work)
    one.of_pass(work)
    assert all_of_them.passes[0].all_rows == 4 * one.passes[0].all_rows
    assert all_of_them.passes[0].kv_tokens == one.passes[0].kv_tokens
