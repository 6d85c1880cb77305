"""Trial passes have each rank's rows, alone or shared, the same expert calls on all ranks, and leave nothing behind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sequence_builders import plan

from sgl_batch.model_executor.partition_trial import PartitionTrial

PAGE, RANKS = 16, 2
PLAN = plan(b_moe_prefill=32, b_moe=8, page_size=PAGE)


class Runner:
    """Notes the rows of each pass. Its table of KV indices has 9 rows, and its pool 64 pages."""

    spec_algorithm = None
    model_config = SimpleNamespace(vocab_size=50)

    def __init__(self) -> None:
        self.max_total_num_tokens = 64 * PAGE
        self.req_to_token_pool = SimpleNamespace(req_to_token=torch.full((9, 640), 7, dtype=torch.int32))
        self.partition, self.calls = None, 0
        self.passes: list[tuple[int, int, list[int] | None]] = []

    def set_expert_calls(self, calls: int) -> None:
        self.calls = calls

    def partition_over(self, ranks) -> None:
        self.partition = None if ranks is None else list(ranks)

    def forward_without_rows(self) -> None:
        self.passes.append((0, self.calls, self.partition))

    def forward(self, batch) -> None:
        table = self.req_to_token_pool.req_to_token
        rows = batch.req_pool_indices
        if batch.forward_mode.is_extend():
            rows = rows.repeat_interleave(len(batch.input_ids))
        assert torch.equal(table[rows, batch.positions].to(torch.int64), batch.out_cache_loc)
        assert int(batch.out_cache_loc.min()) >= PAGE, "the first page is SGLang's"
        self.passes.append((len(batch.input_ids), self.calls, self.partition))


def passes_of(rank: int, ask) -> list[tuple[int, int, list[int] | None]]:
    """Return the passes of a rank, which are all alike: its rows, expert calls and partition."""
    runner = Runner()
    assert ask(PartitionTrial(runner, PLAN, rank=rank, ranks=RANKS)) >= 0
    assert len(runner.passes) == 4
    assert (runner.req_to_token_pool.req_to_token == 7).all()
    assert runner.partition is None
    return sorted(set(map(str, runner.passes)))


@pytest.mark.parametrize(
    ("sequences", "shared", "rows"),
    [(1, False, (1, 0)), (3, False, (2, 1)), (4, False, (2, 2)), (1, True, (1, 1)), (3, True, (3, 3))],
)
def test_sequences_are_dealt_to_the_ranks_or_all_on_each(sequences, shared, rows):
    found = [passes_of(rank, lambda trial: trial.step_s(sequences, 20, shared=shared)) for rank in range(RANKS)]
    assert found == [[str((own, 1, [0, 1] if shared else None))] for own in rows]


@pytest.mark.parametrize(("shared", "rows"), [(False, (40, 0)), (True, (40, 40))])
def test_a_prompt_is_that_of_the_first_rank_or_of_all_with_the_same_expert_calls(shared, rows):
    found = [passes_of(rank, lambda trial: trial.prompt_s(40, shared=shared)) for rank in range(RANKS)]
    assert found == [[str((own, 2, [0, 1] if shared else None))] for own in rows]


def test_what_has_no_room_does_not_fit():
    trial = PartitionTrial(Runner(), PLAN, rank=0, ranks=RANKS)
    assert trial.fits(8, 7 * PAGE)
    assert not trial.fits(9, 1), "rows of the request table"
    assert not trial.fits(8, 8 * PAGE), "pages, of which the first is SGLang's"
    assert not trial.fits(1, 641), "tokens of a row"
