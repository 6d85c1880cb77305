"""A pass over drafts gives as many steps as drafts were right, to the sequences that have not ended before."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scheduler_stand_ins import request

from sgl_batch.config import from_mapping
from sgl_batch.core.speculation import MOST_ROWS
from sgl_batch.managers import speculation
from sgl_batch.managers.speculation import Speculation
from sgl_batch.metrics.counters import Counters

PROMPT = [1, 2, 3, 1, 2]


class Passes:
    """Samples tokens that count on from the last one, and keeps the rows of each pass."""

    def __init__(self) -> None:
        self.rows: list[list[list[int]]] = []

    def run(self, batch: Any) -> Any:
        self.rows.append(batch.drafts)
        sampled = [
            token % 3 + 1
            for one, own in zip(batch.reqs, batch.drafts, strict=True)
            for token in (one.output_ids[-1], *own)
        ]
        return SimpleNamespace(next_token_ids=torch.tensor(sampled))


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    def verifying_batch(scheduler: Any, batch: Any, drafts: Any) -> Any:
        return SimpleNamespace(reqs=batch.reqs, drafts=[list(own) for own in drafts])

    def begin_verified_step(batch: Any, rows: list[int]) -> Any:
        return SimpleNamespace(reqs=[batch.reqs[row] for row in rows])

    monkeypatch.setattr(speculation, "verifying_batch", verifying_batch)
    monkeypatch.setattr(speculation, "begin_verified_step", begin_verified_step)
    monkeypatch.setattr(speculation, "step_result", lambda scheduler, batch, result, tokens: list(tokens))
    monkeypatch.setattr(speculation, "can_verify", lambda batch: True)


def sequence(number: int, outputs: list[int], *, most: int = 20) -> Any:
    made = request(number, max_new_tokens=most, origin_input_ids=PROMPT, output_ids=outputs)
    made.finished = lambda: len(made.output_ids) >= most
    return made


def batch_of(*requests: Any) -> Any:
    return SimpleNamespace(
        reqs=list(requests),
        drafts=[[] for _ in requests],
        forward_mode=SimpleNamespace(is_decode=lambda: True),
        seq_lens_cpu=torch.tensor([len(PROMPT) + len(one.output_ids) for one in requests]),
    )


def speculation_of(
    speculate: str,
    *,
    overlaps: bool = True,
    obstacle: str | None = None,
    rank_context: Any = None,
    split: Any = None,
) -> tuple[Speculation, SimpleNamespace]:
    counted = SimpleNamespace(steps=[], counters=Counters())
    executor: Any = SimpleNamespace(
        plan=SimpleNamespace(page_size=64, decode=SimpleNamespace(expert_rows=3)),
        overlaps=overlaps,
        table=SimpleNamespace(partition=() if split is None else (0, 1)),
        count_step=lambda: counted.steps.append("step"),
        results=SimpleNamespace(begin_verified_step=counted.steps.append),
    )
    context: Any = SimpleNamespace(
        config=from_mapping({"speculate": speculate}), counters=counted.counters, rank_context=rank_context
    )
    others: Any = SimpleNamespace(
        layer_runner=SimpleNamespace(expert_calls=2, partition=SimpleNamespace(split=split)),
        model_config=SimpleNamespace(vocab_size=100),
    )
    return Speculation(others, executor, context, others, obstacle=obstacle), counted


def answer(one: Speculation, batch: Any, passes: Passes) -> None:
    """Run a pass, and let SGLang's part append the tokens of each step."""
    steps = [(batch, one.run(batch, passes.run))]
    tokens: Any = steps[0][1]
    for row, token in zip(batch.reqs, tokens if isinstance(tokens, list) else tokens.next_token_ids, strict=True):
        row.output_ids.append(int(token))
    for step, more in one.further_steps(batch):
        result: Any = more
        for row, token in zip(step.reqs, result, strict=True):
            row.output_ids.append(token)


def test_right_drafts_give_a_step_each_and_end_with_the_first_wrong_one():
    one, counted = speculation_of("3")
    right, wrong = sequence(0, [3]), sequence(1, [3, 1, 2, 2])
    batch, passes = batch_of(right, wrong), Passes()
    answer(one, batch, passes)
    assert passes.rows == [[[1, 2, 3], [2, 2, 2]]]
    assert right.output_ids == [3, 1, 2, 3, 1]
    assert wrong.output_ids == [3, 1, 2, 2, 3]
    assert counted.steps == ["step", 1] * 3
    assert {name: counted.counters.counts[name] for name in ("speculative_passes", "drafts", "drafts_accepted")} == {
        "speculative_passes": 1,
        "drafts": 6,
        "drafts_accepted": 3,
    }


class Split:
    """One rank's end of a set, whose first rank gives its matrices before the others ask for them."""

    def __init__(self, rank: int, given: list[torch.Tensor]) -> None:
        self.rank, self._given = rank, given

    def of_first(self, own: torch.Tensor | None, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        if self.rank == 0:
            assert own is not None
            self._given.append(own)
            return own
        assert own is None
        found = self._given.pop(0)
        assert (found.shape, found.dtype) == (shape, dtype)
        return found


def test_the_ranks_of_a_partition_verify_the_drafts_of_its_first_rank():
    given: list[torch.Tensor] = []
    ranks = [speculation_of("3", split=Split(number, given)) for number in range(2)]
    batches = [batch_of(sequence(0, [3]), sequence(1, [3, 1, 2, 2]), sequence(2, [9])) for _ in ranks]
    first, other = Passes(), Passes()
    for _ in range(3):
        answer(ranks[0][0], batches[0], first)
        answer(ranks[1][0], batches[1], other)
    assert first.rows == other.rows
    assert first.rows[0] == [[1, 2, 3], [2, 2, 2], []]
    assert [one.output_ids for one in batches[0].reqs] == [one.output_ids for one in batches[1].reqs]
    assert ranks[0][1].steps == ranks[1][1].steps
    assert not given


def test_a_sequence_that_ends_in_a_step_has_none_of_the_later_ones():
    one, _ = speculation_of("3")
    ended, goes_on = sequence(0, [3]), sequence(1, [3])
    ended.finished = lambda: len(ended.output_ids) >= 3
    answer(one, batch_of(ended, goes_on), Passes())
    assert ended.output_ids == [3, 1, 2]
    assert goes_on.output_ids == [3, 1, 2, 3, 1]


@pytest.mark.parametrize(("most", "drafts"), [(20, 7), (3, 1), (2, 0)])
def test_no_sequence_drafts_past_its_length(most: int, drafts: int):
    one, _ = speculation_of("7")
    passes = Passes()
    answer(one, batch_of(sequence(0, [3], most=most)), passes)
    assert [len(own) for own in passes.rows[0]] == [drafts]


@pytest.mark.parametrize(("rank_context", "drafts"), [(None, MOST_ROWS - 3), ("of two ranks", 3)])
def test_rows_of_several_ranks_fit_the_expert_calls_that_they_agreed_on(rank_context: Any, drafts: int):
    one, _ = speculation_of("5", rank_context=rank_context)
    passes = Passes()
    answer(one, batch_of(*(sequence(number, [3]) for number in range(3))), passes)
    assert sum(map(len, passes.rows[0])) == drafts


def test_streamed_steps_large_groups_and_prompts_draft_nothing():
    passes = Passes()
    large = batch_of(*(sequence(number, [3]) for number in range(MOST_ROWS)))
    prompt = batch_of(sequence(0, [3]))
    prompt.forward_mode = SimpleNamespace(is_decode=lambda: False)
    for batch, overlaps, speculate in (
        (large, True, "3"),
        (prompt, True, "3"),
        (batch_of(sequence(0, [3])), False, "3"),
        (batch_of(sequence(0, [3])), True, "off"),
    ):
        one, counted = speculation_of(speculate, overlaps=overlaps)
        answer(one, batch, passes)
        assert not counted.counters.counts
    assert not any(own for rows in passes.rows for own in rows)


def test_an_engine_that_cannot_verify_says_so_once(caplog: pytest.LogCaptureFixture):
    one, _ = speculation_of("auto", obstacle="several ranks")
    passes = Passes()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            answer(one, batch_of(sequence(0, [3])), passes)
    assert passes.rows == [[[]], [[]]]
    assert [record.getMessage() for record in caplog.records] == [
        "speculate is auto, and no step drafts tokens: several ranks"
    ]
