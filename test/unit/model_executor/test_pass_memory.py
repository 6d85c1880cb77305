"""A forward pass claims its working memory and the pages of KV that it is the first to write to."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sequence_builders import in_force, plan

from sgl_batch.core.device_budget import ModelShape, pass_bytes
from sgl_batch.memory.process_memory import resident_bytes
from sgl_batch.model_executor import pass_memory
from sgl_batch.model_executor.pass_memory import PassMemory, UntouchedPages

LAYERS, PAGES, PAGE = 3, 10, 4
HUGE = 2 << 20
SHAPE = ModelShape(
    hidden=64,
    vocabulary=100,
    layers=LAYERS,
    attention_width=128,
    experts=8,
    top_k=2,
    expert_width=32,
    dense_width=64,
    item_bytes=2,
)


def parts(page_bytes: int) -> list[torch.Tensor]:
    """Keys and values whose pages take `page_bytes` in each layer; on no device."""
    return [torch.empty(LAYERS * PAGES, page_bytes, dtype=torch.uint8, device="meta") for _ in range(2)]


def slots(*pages: int) -> torch.Tensor:
    return torch.tensor([page * PAGE + 1 for page in pages])


def test_a_page_is_claimed_by_the_first_pass_that_writes_to_it() -> None:
    pages = UntouchedPages(parts(HUGE), LAYERS, PAGE, all_at_once=False)
    of_all_layers = 2 * LAYERS * HUGE
    assert pages.claim(slots(1, 1, 3)) == 2 * of_all_layers
    assert pages.claim(slots(3, 4)) == of_all_layers
    assert pages.claim(slots(4, 1)) == 0
    assert pages.claim(slots(PAGES + 5)) == 0, "pages of prefill's own, not of the pool"


def test_pages_smaller_than_a_huge_page_are_claimed_with_their_neighbours() -> None:
    pages = UntouchedPages(parts(HUGE // 4), LAYERS, PAGE, all_at_once=False)
    assert pages.claim(slots(1)) == 4 * 2 * LAYERS * HUGE // 4
    assert pages.claim(slots(0, 2, 3)) == 0
    assert pages.claim(slots(4)) > 0


def test_all_untouched_pages_are_claimed_if_not_only_passes_write_pages() -> None:
    pages = UntouchedPages(parts(HUGE), LAYERS, PAGE, all_at_once=True)
    of_all_layers = 2 * LAYERS * HUGE
    assert pages.claim(slots(1)) == PAGES * of_all_layers
    assert pages.claim(slots(1)) == (PAGES - 1) * of_all_layers
    assert pages.claim(slots(*range(PAGES))) == (PAGES - 1) * of_all_layers
    assert pages.claim(slots(1)) == 0


def batch(rows: int, sequences: int, *, is_decode: bool) -> Any:
    mode = SimpleNamespace(is_decode=lambda: is_decode)
    return SimpleNamespace(
        forward_mode=mode,
        input_ids=torch.zeros(rows, dtype=torch.int64),
        batch_size=sequences,
        out_cache_loc=torch.zeros(rows, dtype=torch.int64),
        sampling_info=SimpleNamespace(is_all_greedy=is_decode),
        return_logprob=False,
    )


class Streamer:
    """Records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def fit(self, free_bytes: Callable[[], int], working: int) -> None:
        self.calls.append((free_bytes(), working))


def memory(*, staged_bytes: int = 0, budget: int = 0, num_ranks: int = 1, streamer: Any = None) -> PassMemory:
    untouched = UntouchedPages(parts(HUGE), LAYERS, PAGE, all_at_once=False)
    untouched.claim(slots(*range(PAGES)))
    sizes = plan(b_moe_prefill=64, b_moe=16, page_size=PAGE)
    shares = {"staged_bytes": staged_bytes, "budget": budget, "num_ranks": num_ranks}
    return PassMemory(streamer or Streamer(), in_force(sizes), SHAPE, untouched, **shares)


def test_a_pass_takes_what_its_own_rows_need_and_staged_prefill_two_layers_of_kv_besides() -> None:
    sizes = plan(b_moe_prefill=64, b_moe=16, page_size=PAGE)
    small, large = batch(5, 5, is_decode=True), batch(40, 3, is_decode=False)
    assert memory().working_bytes(small) == pass_bytes(
        SHAPE, rows=5, sequences=5, b_attn=sizes.decode.b_attn, greedy=True
    )
    expected = pass_bytes(SHAPE, rows=40, sequences=3, b_attn=sizes.prefill.b_attn)
    assert memory().working_bytes(large) == expected
    assert memory(staged_bytes=1000).working_bytes(large) == expected + 1000 * (10 + 3)


def test_ranks_share_free_memory_and_keep_to_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_memory, "free_bytes", lambda: 1 << 40)
    assert memory().free_bytes() == 1 << 40
    assert memory(num_ranks=4).free_bytes() == 1 << 38
    budget = resident_bytes() + (1 << 30)
    assert abs(memory(budget=budget).free_bytes() - (1 << 30)) < 64 << 20


def test_streamed_experts_get_the_memory_that_a_pass_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_memory, "free_bytes", lambda: 1 << 40)
    streamer, one = Streamer(), batch(40, 3, is_decode=False)
    memory(streamer=streamer).make_room(one)
    assert streamer.calls == [(1 << 40, memory().working_bytes(one))]
