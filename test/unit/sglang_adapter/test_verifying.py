"""A pass over drafts has a row for each position, and its steps go on where the step before ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_batch.sglang_adapter import verifying
from sgl_batch.sglang_adapter.verifying import begin_verified_step, can_verify, step_result, verifying_batch


def batch_of(lengths: list[int], **parts: Any) -> Any:
    """Return a decode batch whose requests have so many tokens, their next ones included; slot 2 belongs to row 0."""
    requests = [
        SimpleNamespace(
            output_ids=[100 + row],
            decode_batch_idx=0,
            kv_committed_len=length,
            kv=SimpleNamespace(kv_allocated_len=length),
        )
        for row, length in enumerate(lengths)
    ]
    slots = torch.arange(2, 2 + len(lengths))
    made = SimpleNamespace(
        reqs=requests,
        device="cpu",
        req_pool_indices=slots,
        req_pool_indices_cpu=slots,
        seq_lens=torch.tensor(lengths),
        seq_lens_cpu=torch.tensor(lengths),
        out_cache_loc=torch.tensor([1000 * (row + 1) for row in range(len(lengths))]),
        sampling_info=SimpleNamespace(penalizer_orchestrator=SimpleNamespace(is_required=False)),
    )
    made.copy = lambda: SimpleNamespace(reqs=list(made.reqs))
    vars(made).update(parts)
    return made


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(verifying, "new_batch", lambda scheduler, requests: SimpleNamespace(reqs=requests))
    monkeypatch.setattr(verifying, "make_repeatable", lambda batch: None)
    monkeypatch.setattr(verifying.SamplingBatchInfo, "from_schedule_batch", lambda batch, vocab_size: "of its rows")
    return SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(8, 64, dtype=torch.int32)),
        device="cpu",
        model_config=SimpleNamespace(vocab_size=10),
        future_map=SimpleNamespace(stash=lambda slots, payload: None),
    )


def test_a_request_has_a_row_for_its_next_token_and_one_for_each_draft(scheduler: Any) -> None:
    batch = batch_of([5, 9, 7])
    wide: Any = verifying_batch(scheduler, batch, [(7, 8), (), (9,)])
    assert wide.input_ids.tolist() == [100, 7, 8, 101, 102, 9]
    assert wide.seq_lens.tolist() == wide.seq_lens_cpu.tolist() == wide.orig_seq_lens.tolist() == [5, 6, 7, 9, 7, 8]
    assert wide.req_pool_indices.tolist() == [2, 2, 2, 3, 4, 4]
    assert wide.out_cache_loc.tolist() == [1000, 1001, 1002, 2000, 3000, 3001]
    assert [request.output_ids[0] for request in wide.reqs] == [100, 100, 100, 101, 102, 102]
    table = scheduler.req_to_token_pool.req_to_token
    assert table[2, 4:7].tolist() == [1000, 1001, 1002]
    assert table[4, 6:8].tolist() == [3000, 3001]
    assert batch.seq_lens.tolist() == [5, 9, 7], "the batch itself stays at its next step"


def test_a_verified_step_adds_a_token_to_its_requests_alone() -> None:
    batch = batch_of([5, 9, 7])
    step: Any = begin_verified_step(batch, [0, 2])
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == [6, 9, 8]
    assert [request.kv_committed_len for request in batch.reqs] == [6, 9, 8]
    assert [request.kv.kv_allocated_len for request in batch.reqs] == [6, 9, 8]
    assert step.reqs == [batch.reqs[0], batch.reqs[2]]
    assert step.req_pool_indices.tolist() == [2, 4]
    assert step.seq_lens_cpu.tolist() == [6, 8]


def test_the_next_step_begins_with_the_tokens_of_a_verified_one(scheduler: Any) -> None:
    stashed = []
    scheduler.future_map.stash = lambda slots, payload: stashed.append((slots.tolist(), payload.bonus_tokens.tolist()))
    whole: Any = SimpleNamespace(next_token_ids=torch.arange(6), logits_output="of the pass")
    step = step_result(scheduler, batch_of([5, 9]), whole, [4, 5])
    assert step.next_token_ids.tolist() == [4, 5]
    assert stashed == [([2, 3], [4, 5])]
    assert len(whole.next_token_ids) == 6


@pytest.mark.parametrize("part", ["grammar", "return_logprob", "to_finish", "custom_logit_processor"])
def test_a_group_with_a_request_of_single_steps_verifies_nothing(part: str) -> None:
    batch = batch_of([5, 9])
    assert can_verify(batch)
    setattr(batch.reqs[1], part, True)
    assert not can_verify(batch)


def test_a_group_with_penalties_verifies_nothing() -> None:
    penalised = SimpleNamespace(penalizer_orchestrator=SimpleNamespace(is_required=True))
    assert not can_verify(batch_of([5], sampling_info=penalised))
