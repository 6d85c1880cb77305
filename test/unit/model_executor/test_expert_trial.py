"""Calls of experts on synthetic rows are the same for all runners, timed and compared."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sgl_batch.core.decode_choice import TimeUp
from sgl_batch.layers.moe.cpu_experts import combined_experts
from sgl_batch.model_executor.expert_trial import ExpertTrial

EXPERTS, HIDDEN, WIDTH, TOP_K, TOKENS = 4, 16, 8, 2, (1, 6)


def layer_of(seed):
    draw = torch.Generator().manual_seed(seed)
    return SimpleNamespace(
        w13_weight=torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=draw),
        w2_weight=torch.randn(EXPERTS, HIDDEN, WIDTH, generator=draw),
        top_k=TOP_K,
    )


def never():
    return False


class Runners:
    """`torch`: as it is; `off`: its outputs with an error; `within`: lays them over its rows, as SGLang's own."""

    def __init__(self):
        self.calls = []

    def call_of(self, name):
        def call(layer, x, weights, ids):
            out = combined_experts(x, layer.w13_weight, layer.w2_weight, weights, ids)[0]
            self.calls.append((name, layer, x.clone(), ids))
            return {"torch": out, "off": out * 1.25, "within": x.copy_(out)}[name]

        return call


@pytest.fixture
def runners():
    return Runners()


@pytest.fixture
def trial(runners):
    return ExpertTrial([layer_of(1), layer_of(2)], TOKENS, runners.call_of)


def test_all_runners_get_the_same_rows_and_are_compared_with_the_first(trial, runners):
    first, within, off = (trial.run(name, never) for name in ("torch", "within", "off"))
    assert first.errors == within.errors == (0.0, 0.0)
    assert off.errors == pytest.approx((0.25, 0.25))
    assert all(len(found.seconds) == 2 and min(found.seconds) > 0 for found in (first, within, off))
    given = {name: [(x, ids) for by, _, x, ids in runners.calls if by == name] for name in ("torch", "within", "off")}
    for name in ("within", "off"):
        for (x, ids), (wanted, wanted_ids) in zip(given[name], given["torch"], strict=True):
            assert torch.equal(x, wanted)
            assert torch.equal(ids, wanted_ids)
    assert {len(x) for _, _, x, _ in runners.calls} == set(TOKENS)
    assert all(len(set(row)) == TOP_K for _, _, _, ids in runners.calls for row in ids.tolist())


def test_calls_go_through_the_layers_in_turn(trial, runners):
    trial.run("torch", never)
    layers = [id(layer) for _, layer, _, _ in runners.calls]
    assert layers[0] != layers[1]
    assert layers[::2].count(layers[0]) == len(layers) / 2


def test_calls_stop_when_the_time_is_up(trial, runners):
    asked = iter([False, False, True])
    with pytest.raises(TimeUp):
        trial.run("torch", lambda: next(asked))
    assert len(runners.calls) == 2
