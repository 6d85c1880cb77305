"""Choices of experts are kept by sequence and position, for requests that ask for them, whatever groups made them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_batch.model_executor.expert_choices import ExpertChoices

LAYERS, TOP_K = 3, 2
EXPERT_LAYERS = (1, 2)  # the first is dense


class Request(SimpleNamespace):
    """As far as choices know one."""

    __hash__ = object.__hash__

    @property
    def output_ids_through_stop(self) -> list[int]:
        output: list[int] = self.output_ids
        return output


def request(request_slot: int, prompt: int, *, output: int = 1, asks: bool = True, start: int = 0) -> Request:
    return Request(
        req_pool_idx=request_slot,
        origin_input_ids=[5] * prompt,
        output_ids=[6] * output,
        return_routed_experts=asks,
        routed_experts_start_len=start,
    )


@pytest.fixture
def choices() -> ExpertChoices:
    return ExpertChoices(num_layers=LAYERS, num_expert_layers=len(EXPERT_LAYERS), top_k=TOP_K)


def run_pass(choices: ExpertChoices, rows: list[tuple[Any, int, int]], first: int, cut: int = 0) -> torch.Tensor:
    """A pass whose expert calls are cut in two; what it chose [T, L, K]."""
    total = sum(length for _, _, length in rows)
    chosen = torch.zeros(total, LAYERS, TOP_K, dtype=torch.int32)
    for layer in EXPERT_LAYERS:
        chosen[:, layer] = first + layer + torch.arange(total * TOP_K).view(total, TOP_K)
        for part in (chosen[:cut, layer], chosen[cut:, layer]):
            choices.capture(layer_id=layer, topk_indices=part)
    choices.on_forward_end(forward_batch=None)
    choices.note(rows)
    return chosen


def test_rows_of_a_pass_go_to_their_sequences_however_expert_calls_are_cut(choices: ExpertChoices) -> None:
    one, silent, other = request(0, 3), request(1, 2, asks=False), request(2, 4, start=1)
    chosen = run_pass(choices, [(one, 0, 3), (silent, 0, 2), (other, 0, 4)], first=10, cut=5)
    assert torch.equal(choices.of(one), chosen[:3])
    assert torch.equal(choices.of(other), chosen[6:])
    assert torch.equal(choices.get_topk(2, seqlen=5, req_to_token_pool=None, start_len=1), chosen[6:])


def test_choices_of_decode_steps_follow_the_prompts_in_any_order_and_request_slot(choices: ExpertChoices) -> None:
    one, other = request(0, 2), request(1, 1)
    prompts = run_pass(choices, [(one, 0, 2), (other, 0, 1)], first=0)
    one.req_pool_idx, one.output_ids = 7, [6, 6]
    step = run_pass(choices, [(other, 1, 1), (one, 2, 1)], first=50)
    assert torch.equal(choices.get_topk(7), torch.cat((prompts[:2], step[1:])))


def test_what_is_computed_again_has_the_later_choice(choices: ExpertChoices) -> None:
    one = request(0, 2)
    run_pass(choices, [(one, 0, 2)], first=0)
    one.output_ids = [6, 6]
    run_pass(choices, [(one, 2, 1)], first=20)
    again = run_pass(choices, [(one, 0, 3)], first=40)
    assert torch.equal(choices.of(one), again)


def test_a_layer_that_reports_no_choice_is_an_error(choices: ExpertChoices) -> None:
    choices.capture(layer_id=1, topk_indices=torch.zeros(1, TOP_K))
    choices.on_forward_end()
    with pytest.raises(AssertionError, match="1 of 2 layers"):
        choices.note([(request(0, 1), 0, 1)])


def test_a_skipped_position_is_an_error(choices: ExpertChoices) -> None:
    with pytest.raises(AssertionError, match="from position 1 on, where 0 are known"):
        run_pass(choices, [(request(0, 2), 1, 1)], first=0)
