"""SGLang's layer chooses experts by the native kernel where it scores by softmax or sigmoid, else by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sgl_batch.kernel_loader import native_kernels
from sgl_batch.layers.moe import cpu_topk
from sgl_batch.sglang_adapter.layers import TopK

KEY = "a-platform-of-this-test"


class Spy:
    """The kernels, and whether they were asked."""

    def __init__(self) -> None:
        self.calls = 0

    def topk(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return native_kernels().topk(*args, **kwargs)


@pytest.fixture
def spy() -> Spy:
    return Spy()


@pytest.fixture
def choose(spy: Spy) -> Iterator[Callable[..., Any]]:
    """The forward that SGLang finds for the layer."""
    cpu_topk.register(spy, KEY)
    yield TopK._oot_forward_registry[KEY][TopK]
    del TopK._oot_forward_registry[KEY]


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_chooses_as_sglang_does(choose, spy, dtype, renormalize):
    # No two logits of a row are equal: of equal ones torch may choose any.
    logits = torch.stack([torch.randperm(64, generator=torch.Generator().manual_seed(i)) for i in range(20)]) / 8
    topk, hidden = TopK(8, renormalize=renormalize), torch.zeros(20, 4)
    found = choose(topk, hidden, logits.to(dtype))
    assert spy.calls == 1
    own = topk.forward_native(hidden, logits.to(dtype))
    assert found.topk_ids.tolist() == own.topk_ids.tolist()
    assert torch.allclose(found.topk_weights, own.topk_weights, rtol=1e-5)
    assert (found.topk_weights.dtype, found.topk_ids.dtype) == (torch.float32, torch.int32)
    assert torch.equal(found.router_logits, logits.to(dtype))


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"scoring_func": "sigmoid"},
        {"scoring_func": "sigmoid", "correction_bias": torch.randn(64)},
        {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2},
        {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2, "scoring_func": "sigmoid"},
        {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2, "correction_bias": torch.randn(64)},
        {"use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1, "correction_bias": torch.randn(64)},
    ],
    ids=lambda options: " ".join(options),
)
def test_the_kernel_scores_by_the_layers_options(choose, spy, options, renormalize):
    logits = torch.randn(20, 64, generator=torch.Generator().manual_seed(1))
    topk, hidden = TopK(8, renormalize=renormalize, **options), torch.zeros(20, 4)
    found, own = choose(topk, hidden, logits), topk.forward_native(hidden, logits)
    assert spy.calls == 1
    for row in range(20):
        expected = dict(zip(own.topk_ids[row].tolist(), own.topk_weights[row].tolist(), strict=True))
        chosen = dict(zip(found.topk_ids[row].tolist(), found.topk_weights[row].tolist(), strict=True))
        assert chosen == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"scoring_func": "sqrtsoftplus"},
        {"correction_bias": torch.ones(8)},
        {"apply_routed_scaling_factor_on_output": True},
        {"custom_routing_function": lambda **given: given["gating_output"].topk(given["topk"])},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_choices_stay_sglangs_own(choose, spy, options, monkeypatch):
    topk, hidden, logits = TopK(2, **options), torch.zeros(3, 4), torch.randn(3, 8)
    monkeypatch.setattr(topk, "forward_native", lambda *given: given)
    assert choose(topk, hidden, logits) == (hidden, logits)
    assert spy.calls == 0


def test_padded_rows_stay_sglangs_own(choose, spy, monkeypatch):
    topk, hidden, logits = TopK(2), torch.zeros(3, 4), torch.randn(3, 8)
    monkeypatch.setattr(topk, "forward_native", lambda *_, **given: given)
    assert choose(topk, hidden, logits, num_token_non_padded=2) == {"num_token_non_padded": 2}
    assert spy.calls == 0
