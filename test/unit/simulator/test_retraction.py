"""SGLang's order of events where each step begins an interval and each token has a page."""

from __future__ import annotations

from linear_costs import LinearCosts, requests

from sgl_batch.core.plan import PhasePlan, Plan
from sgl_batch.simulator.instance import Instance
from sgl_batch.simulator.rank import SimulatedRank
from sgl_batch.simulator.rivals.lazy_pages import LazyPages
from sgl_batch.simulator.rivals.static_binding import DecodeFirst, PrefillFirst
from sgl_batch.simulator.rivals.token_ratio import TokenRatio
from sgl_batch.simulator.scheduler import Scheduler


def run(
    lengths: list[tuple[int, int]], *, pages: int, rows: int = 16, scheduler: Scheduler | None = None
) -> tuple[list[str], SimulatedRank, list[int]]:
    """Return the passes, the rank, and the sequences in the order in which they gave up their pages.

    A pass is "p" with the prompts that it computes, or "d" with its rows.
    """
    prompts, outputs = zip(*lengths, strict=True)
    plan = Plan(
        prefill=PhasePlan(b_attn=512, b_moe=512),
        decode=PhasePlan(b_attn=rows, b_moe=rows),
        page_size=1,
        boundary_tokens=1,
        refill_watermark=1.0,
        ready_target=rows,
    )
    released: list[int] = []
    form = LazyPages(
        pages,
        1,
        TokenRatio(0.01),
        waits_last=scheduler is None,
        on_release=lambda one: released.append(int(one.sequence_id)),
    )
    made = requests(prompts, outputs)
    rank = SimulatedRank(made, range(len(lengths)), plan, form, request_slots=rows)
    costs = LinearCosts()
    Instance([rank], plan, scheduler or PrefillFirst(), costs).run()
    return [f"p{one.prompts}" if one.prompts else f"d{one.rows}" for one in costs.passes], rank, released


def test_a_full_batch_tries_prompts_again_one_step_after_a_sequence_has_ended():
    passes, _, _ = run([(4, 3), (4, 6), (4, 2)], pages=1000, rows=2)
    assert passes == ["p2", "d2", "d2", "d1", "p1", "d2", "d1"]


def test_a_sequence_that_has_ended_keeps_its_row_until_the_next_step():
    # The first ends in the third pass, the second in the fourth. The fourth sequence takes the first one's row; the
    # fifth takes the second one's, but only after a step without it.
    passes, _, _ = run([(4, 3), (4, 4), (4, 9), (4, 9), (4, 9)], pages=1000, rows=3)
    assert passes[:5] == ["p3", "d3", "d3", "d2", "p1"]
    assert passes[5:7] == ["d2", "p1"]


def test_a_retracted_sequence_waits_behind_all_others():
    # Of the first two, which have generated as much, the one with the longer prompt is retracted.
    _, rank, released = run([(10, 30), (12, 30), (10, 30)], pages=60)
    assert rank.tally.suspensions == 1
    assert released == [1, 0, 2, 1]


def test_of_several_that_vllm_preempts_the_first_to_join_comes_back_first():
    _, rank, released = run([(10, 40), (10, 40), (10, 40)], pages=60, scheduler=DecodeFirst())
    assert rank.tally.suspensions >= 2
    assert released[-2:] == [1, 2]


def test_the_tokens_that_a_sequence_was_retracted_with_are_computed_again():
    _, rank, _ = run([(10, 30), (12, 30)], pages=60)
    # Two sequences of 22 prompt tokens fill 60 pages after 19 steps each; the prompt and 19 tokens are lost.
    assert rank.tally.again == 12 + 19
    assert rank.tally.prompt_tokens == 22
