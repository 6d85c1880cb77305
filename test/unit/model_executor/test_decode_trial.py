"""Synthetic decode steps are the same in every mode, use request slots of their own, and leave nothing behind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sgl_batch.core.decode_choice import DEFAULT, SGLANG, TimeUp
from sgl_batch.core.graph_capture import PASSES_BEFORE_CAPTURE
from sgl_batch.model_executor.decode_trial import DecodeTrial

PAGE, VOCABULARY = 16, 50


class Runner:
    """Answers each token with the one after it; its table of KV indices has 9 rows, and its pool `pages` pages."""

    device = "cpu"
    spec_algorithm = None

    def __init__(self, pages=64, fails_in=None):
        self.max_total_num_tokens = pages * PAGE
        self.req_to_token_pool = SimpleNamespace(req_to_token=torch.full((9, 64), 7, dtype=torch.int32))
        self.mode, self.passes, self.fails_in = DEFAULT, [], fails_in

    def compute_decode_by(self, mode):
        self.mode = mode

    def graph_serves(self, batch):
        return batch.batch_size == 8

    def forward(self, batch):
        if self.mode == self.fails_in:
            raise RuntimeError("no kernel")
        table = self.req_to_token_pool.req_to_token
        kv_indices = table[batch.req_pool_indices, batch.positions]
        assert torch.equal(kv_indices.to(torch.int64), batch.out_cache_loc)
        assert batch.seq_lens.tolist() == [one + 1 for one in batch.positions.tolist()] == batch.seq_lens_cpu.tolist()
        self.passes.append((self.mode, batch))
        logits = torch.nn.functional.one_hot((batch.input_ids + 1) % VOCABULARY, VOCABULARY).float() * 2
        logits[:, 0] += 1.5
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits))


def never():
    return False


def trial(runner, sizes=(8, 2)):
    return DecodeTrial(runner, sizes, page_size=PAGE, vocabulary=VOCABULARY)


def test_steps_are_the_same_in_each_mode_and_leave_nothing():
    runner = Runner()
    steps = trial(runner)
    assert steps.graph_serves()
    first, second = steps.run_steps(DEFAULT, never), steps.run_steps(SGLANG, never)
    assert (first.tokens, first.margins) == (second.tokens, second.margins)
    assert len(first.seconds) == 2
    assert len(first.tokens) == 4 * (8 + 2)
    ids = {mode: [batch.input_ids.tolist() for by, batch in runner.passes if by == mode] for mode in (DEFAULT, SGLANG)}
    assert ids[DEFAULT] == ids[SGLANG]
    compared = ids[DEFAULT][6]
    assert first.tokens[:8] == tuple((token + 1) % VOCABULARY for token in compared), "not before graphs replay"
    assert PASSES_BEFORE_CAPTURE < 6
    assert first.margins[0] == pytest.approx(0.25)
    assert runner.mode == DEFAULT
    assert (runner.req_to_token_pool.req_to_token == 7).all()


def test_each_sequence_has_pages_of_its_own_in_the_pool():
    runner = Runner()
    trial(runner).run_steps(DEFAULT, never)
    pages: dict[int, set[int]] = {}
    for _, batch in runner.passes:
        for row, kv_index in zip(batch.req_pool_indices.tolist(), batch.out_cache_loc.tolist(), strict=True):
            pages.setdefault(row, set()).add(kv_index // PAGE)
    taken = [page for of_row in pages.values() for page in of_row]
    assert len(taken) == len(set(taken)) == 16
    assert min(taken) == 1
    assert max(taken) <= 64


@pytest.mark.parametrize(("pages", "sizes"), [(64, (8, 4)), (6, (3,)), (2, (1,)), (1, ())])
def test_groups_are_no_larger_than_the_pool_and_the_table(pages, sizes):
    steps = trial(Runner(pages=pages), (20, 4))
    assert steps.sizes == sizes
    assert not sizes or len(steps.run_steps(DEFAULT, never).seconds) == len(sizes)


def test_a_mode_that_fails_leaves_the_runner_in_its_default():
    runner = Runner(fails_in=SGLANG)
    with pytest.raises(RuntimeError, match="no kernel"):
        trial(runner).run_steps(SGLANG, never)
    assert runner.mode == DEFAULT
    assert (runner.req_to_token_pool.req_to_token == 7).all()


def test_steps_stop_when_the_time_is_up():
    runner, asked = Runner(), iter([False, False, False, True])
    with pytest.raises(TimeUp):
        trial(runner).run_steps(SGLANG, lambda: next(asked))
    assert (runner.mode, len(runner.passes)) == (DEFAULT, 3)
    assert (runner.req_to_token_pool.req_to_token == 7).all()
