"""Which requests stay in a decode batch whose last step's results are not known yet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sgl_batch.sglang_adapter.scheduling import drop_last_steps, tokens_written


def request(*, generated: int, most: int = 8, ended: bool = False, ends: bool = False) -> Any:
    return SimpleNamespace(
        origin_input_ids=[5] * 100,
        output_ids=[7] * generated,
        sampling_params=SimpleNamespace(max_new_tokens=most),
        to_finish=object() if ends else None,
        finished=lambda: ended,
    )


@pytest.mark.parametrize(
    ("row", "stays"),
    [
        (request(generated=6), True),
        (request(generated=7), False),  # the token under way is its eighth
        (request(generated=3, ended=True), False),
        (request(generated=3, ends=True), False),
    ],
    ids=["two tokens left", "its last token is under way", "ended a step ago", "aborted"],
)
def test_requests_that_may_need_another_step_stay(row: Any, stays: bool) -> None:
    kept: list[int] = []
    running = SimpleNamespace(
        reqs=[request(generated=1), row, request(generated=1)],
        filter_batch=lambda keep_indices: kept.extend(keep_indices),
    )
    drop_last_steps(running)
    assert kept == ([0, 1, 2] if stays else [0, 2])


def test_the_last_token_has_no_kv_from_processed_steps() -> None:
    assert tokens_written(request(generated=1)) == 100
    assert tokens_written(request(generated=5)) == 104
