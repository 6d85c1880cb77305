"""A pass lasts as long as its longest part, prompts or decode; how busy the others are follows from their work."""

from __future__ import annotations

from types import SimpleNamespace

import made_runs as made
import pytest

from sgl_batch.simulator.passes import PLAIN, RankPass, pass_time
from sgl_batch.simulator.rank import Prompts


def rank(rows: int, kv_tokens: int) -> SimpleNamespace:
    return SimpleNamespace(running=dict.fromkeys(range(rows)), kv_tokens=kv_tokens, form=SimpleNamespace(streams=False))


def time_and_busy(prompt_s: float) -> tuple[float, float]:
    """Return the seconds of a pass and its busy share: one rank computes 100 prompt tokens, one of two others decodes.

    `prompt_s`: of a prompt token; the decode takes 64 ms.
    """
    costs = made.LineCosts(fixed_s=0.0, row_s=1e-3, context_s=0.0, prompt_s=prompt_s)
    prefill = RankPass(Prompts(count=1, tokens=100, pairs=5050), [], decodes=False)
    ranks = [rank(64, 64_000), rank(64, 64_000), rank(0, 0)]
    found, busy = pass_time(ranks, [prefill, PLAIN, PLAIN], [False, True, True], 1, costs)  # type: ignore[arg-type]
    return found.seconds, busy


@pytest.mark.parametrize(("prompt_s", "seconds"), [(1e-3, 0.1), (1e-4, 0.064)])
def test_prompts_and_decode_of_different_ranks_are_priced_apart(prompt_s, seconds):
    found, busy = time_and_busy(prompt_s)
    assert found == pytest.approx(seconds)
    assert busy == pytest.approx((100 * prompt_s + 0.064) / 3 / seconds)


def test_ranks_that_do_the_same_wait_by_their_work():
    costs = made.LineCosts()
    ranks = [rank(10, 10_000), rank(5, 5_000)]
    found, busy = pass_time(ranks, [PLAIN, PLAIN], [True, True], 1, costs)  # type: ignore[arg-type]
    assert found.seconds == pytest.approx(costs.fixed_s + 10 * costs.row_s + 10_000 * costs.context_s)
    assert busy == pytest.approx(0.75)
