"""A user's callback is found by name, and called with what yields after attention of each layer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sequence_builders import in_force
from toy_model import ToyBackend, ToyFamily, ToyModel, decode_batch, extend_batch

from sgl_batch.config import from_mapping
from sgl_batch.core.plan import PhasePlan, Plan
from sgl_batch.errors import ConfigError
from sgl_batch.mem_cache.device_page_pool import DevicePagePool
from sgl_batch.metrics.counters import Counters
from sgl_batch.model_executor.layer_runner import LayerRunner
from sgl_batch.model_executor.yield_callback import YieldCallback, YieldedSequence, find_on_yield

LAYERS, PAGE, HEADS, DIM = 2, 8, 2, 4


def test_the_callback_is_called_after_attention_of_each_sub_batch_and_before_the_experts() -> None:
    phase = PhasePlan(b_attn=3, b_moe=100)
    plan = Plan(prefill=phase, decode=phase, page_size=8, boundary_tokens=8, refill_watermark=0.5, ready_target=8)
    backend = ToyBackend()
    family, yielded = ToyFamily(backend), []

    def note(sequences, layer, kv) -> None:
        family.order.append(f"yield {layer}")
        yielded.append([(one.request_id, one.row, one.num_tokens, one.num_new) for one in sequences])

    runner = LayerRunner(
        model=ToyModel(LAYERS),
        family=family,
        attn_backend=backend,
        in_force=in_force(plan),
        counters=Counters(),
        can_reenter=True,
        expert_part="experts",
        on_yield=YieldCallback(note, SimpleNamespace(start_layer=0), torch.zeros(1, 1)),
    )
    batch = decode_batch([5, 6, 7, 8])
    batch.rids = ["a", "b", "c", "d"]
    runner.forward(batch)
    assert family.order == [
        step for i in range(LAYERS) for step in [*[f"attention {i}", f"yield {i}"] * 2, f"experts {i}", f"finish {i}"]
    ]
    assert yielded == [[("a", 40, 5, 1), ("b", 41, 6, 1), ("c", 42, 7, 1)], [("d", 43, 8, 1)]] * LAYERS
    yielded.clear()
    batch = extend_batch([0, 3], [4, 2])
    batch.rids = ["e", "f"]
    runner.forward(batch)
    assert yielded[:2] == [[("e", 40, 3, 3)], [("e", 40, 4, 1), ("f", 41, 5, 2)]], "by pieces"


def test_setting_kv_changes_one_layer_and_sequence() -> None:
    pool = DevicePagePool(10 * PAGE, PAGE, torch.float32, HEADS, DIM, LAYERS, "cpu", False)
    table = torch.arange(2 * 20).view(2, 20) + PAGE
    batch = decode_batch([12, 9])
    batch.req_pool_indices = torch.tensor([1, 0])

    def double(sequences, layer, kv) -> None:
        if layer == 1:
            keys, values = kv.get(sequences[0])
            assert keys.shape == values.shape == (12, HEADS, DIM)
            kv.set(sequences[0], keys + 1, values + 2)

    callback = YieldCallback(double, pool, table)
    for layer in range(LAYERS):
        callback(batch, layer)
    for layer, row, tokens in ((0, 1, 20), (1, 0, 20)):
        keys, values = pool.read_kv(layer, table[row, :tokens])
        assert not keys.any()
        assert not values.any()
    keys, values = pool.read_kv(1, table[1])
    assert torch.equal(keys[:, 0, 0], torch.tensor([1.0] * 12 + [0.0] * 8))
    assert torch.equal(values[:, 0, 0], torch.tensor([2.0] * 12 + [0.0] * 8))
    one = YieldedSequence(request_id=None, row=1, num_tokens=12, num_new=1)
    wrong = YieldCallback(lambda sequences, layer, kv: kv.set(one, keys, values), pool, table)
    with pytest.raises(AssertionError, match="KV of 12 tokens is to be set"):
        wrong(batch, 0)


def test_a_callback_is_found_by_the_name_of_its_module_and_its_own() -> None:
    assert find_on_yield("math:sqrt")(4.0) == 2.0  # type: ignore[call-arg,arg-type]


def test_a_name_without_a_callable_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"on_yield is 'math:pi', and .* name a function of sequences, layer and KV"):
        find_on_yield("math:pi")


@pytest.mark.parametrize("name", ["callbacks", "callbacks:", ":round_kv", "callbacks:round kv", ""])
def test_a_name_that_is_not_module_and_name_is_refused_at_once(name: str) -> None:
    with pytest.raises(ConfigError, match="it takes module:name"):
        from_mapping({"on_yield": name})
