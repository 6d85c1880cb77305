"""Penalties for repeated tokens are ours where the logits fit, and SGLang's own elsewhere."""

from __future__ import annotations

import pytest
import torch

from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.layers import replace_repetition_penalties

with bootstrap.importing():
    from sglang.srt.sampling import sampling_batch_info
    from sglang.srt.sampling.penaltylib import repetition_penalty

MODULES = (sampling_batch_info, repetition_penalty)


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ours is called with, in a process where SGLang's function was plain."""
    calls: list[str] = []

    def own(logits: torch.Tensor, penalties: torch.Tensor) -> None:
        calls.append("SGLang's")

    def ours(logits: torch.Tensor, penalties: torch.Tensor) -> None:
        calls.append("ours")

    for module in MODULES:
        monkeypatch.setattr(module, "apply_scaling_penalties", own)
    replace_repetition_penalties(ours)
    return calls


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    ("logits", "penalties", "whose"),
    [
        (torch.zeros(2, 8), torch.ones(2, 8), "ours"),
        (torch.zeros(2, 8).bfloat16(), torch.ones(2, 8), "SGLang's"),
        (torch.zeros(2, 16)[:, ::2], torch.ones(2, 8), "SGLang's"),
        (torch.zeros(2, 8), torch.ones(1, 8), "SGLang's"),
    ],
    ids=["float32", "bfloat16", "logits apart", "one row of penalties"],
)
def test_logits_that_fit_are_changed_by_ours(replaced, module, logits, penalties, whose):
    module.apply_scaling_penalties(logits, penalties)
    assert replaced == [whose]
