"""What fits: bytes of weights, KV and reserves on a device and in host memory, and the regimes that come of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_batch.errors import ConfigError
from sgl_batch.planner.candidate import DEVICE, INCLUSIVE, STREAMED
from sgl_batch.planner.layouts import Layout
from sgl_batch.simulator.cluster.capacity import LEAST_TOKENS, device_weights, kv_bytes, rank_memory
from sgl_batch.simulator.cluster.deployment import deployment, feasible
from sgl_batch.simulator.cluster.engines import BATCHGEN, DEEPSPEED, FLEXGEN, SGLANG, VLLM
from sgl_batch.simulator.cluster.hardware import cluster_named
from sgl_batch.simulator.cluster.models import model_named
from sgl_batch.simulator.cluster.regime import DATA_PARALLEL, HOST, Regime

DEEPSEEK, MIXTRAL = model_named("deepseek-r1"), model_named("mixtral-8x7b")
H20, A5000 = cluster_named("h20x16"), cluster_named("a5000x1")
RANKS, TENSOR = Layout(ranks=16), Layout(ranks=16, tensor=True)


def test_ranks_have_all_weights_but_the_experts_each_and_tensor_parallel_ones_a_part_of_all():
    ranks, tensor = (device_weights(DEEPSEEK, SGLANG, layout, Regime()) for layout in (RANKS, TENSOR))
    assert ranks == DEEPSEEK.other_bytes + DEEPSEEK.expert_bytes / 16
    assert tensor == pytest.approx((DEEPSEEK.other_bytes + DEEPSEEK.expert_bytes) / 16)


def test_all_bytes_of_a_device_are_accounted_for():
    memory = rank_memory(DEEPSEEK, H20, SGLANG, RANKS, Regime())
    assert memory.total == 97871 << 20
    kv = memory.total - memory.weights - memory.reserve
    assert kv - memory.kv_token < memory.device_tokens * memory.kv_token <= kv
    assert memory.store_tokens == 0
    assert memory.reserve == SGLANG.reserve_bytes.best + SGLANG.ranks_reserve_bytes.best


def test_latent_kv_is_whole_on_each_tensor_parallel_rank_and_heads_are_split():
    assert rank_memory(DEEPSEEK, H20, SGLANG, TENSOR, Regime()).kv_token == DEEPSEEK.kv_token_bytes
    eight = Layout(ranks=8, tensor=True)
    assert rank_memory(MIXTRAL, cluster_named("h20x8"), SGLANG, eight, Regime()).kv_token == MIXTRAL.kv_token_bytes / 8


def test_the_store_is_what_weights_and_the_system_leave_of_a_node():
    of_experts, without = (
        rank_memory(DEEPSEEK, H20, BATCHGEN, RANKS, Regime(kv=INCLUSIVE, prefill=prefill)).store_tokens
        for prefill in (DATA_PARALLEL, "expert parallel")
    )
    system = BATCHGEN.host_reserve_bytes.best
    assert without == (2e12 - system) / 8 // DEEPSEEK.kv_token_bytes
    assert of_experts == (2e12 - system - DEEPSEEK.expert_bytes) / 8 // DEEPSEEK.kv_token_bytes


def test_what_does_not_fit_is_refused_with_its_numbers():
    with pytest.raises(ConfigError, match=r"DeepSeek-R1 on h20x16.*GiB.*stream weights"):
        deployment(DEEPSEEK, H20, SGLANG, Layout(instances=16))
    with pytest.raises(ConfigError, match="32 GPUs"):
        deployment(DEEPSEEK, H20, SGLANG, Layout(ranks=32))
    with pytest.raises(ConfigError, match="tensor parallel ranks share each sequence"):
        deployment(DEEPSEEK, H20, BATCHGEN, TENSOR, Regime(prefill=DATA_PARALLEL))
    assert feasible(DEEPSEEK, "a5000x1", SGLANG) == []


def test_weights_are_streamed_as_far_as_they_must():
    with pytest.raises(ConfigError, match="stream weights"):
        deployment(MIXTRAL, A5000, BATCHGEN)
    found = feasible(MIXTRAL, A5000, BATCHGEN)
    shares = sorted({one.regime.streamed_weights for one in found})
    assert 0.8 < shares[0] < 1 == shares[-1]
    assert all(one.device_tokens >= LEAST_TOKENS for one in found)
    with pytest.raises(ConfigError, match="stream weights"):
        deployment(MIXTRAL, A5000, BATCHGEN, regime=Regime(streamed_weights=shares[0] - 1 / 16))


def test_engines_differ_in_the_regimes_that_they_have():
    forms = {
        engine.name: {(one.regime.kv, one.regime.attention) for one in feasible(MIXTRAL, A5000, engine)}
        for engine in (BATCHGEN, FLEXGEN, DEEPSPEED)
    }
    assert forms["deepspeed"] == {(DEVICE, DEVICE), (STREAMED, DEVICE)}
    assert forms["flexgen"] == {(INCLUSIVE, DEVICE), (INCLUSIVE, HOST), (STREAMED, DEVICE)}
    assert forms["batchgen"] == forms["flexgen"] | {(DEVICE, DEVICE)}


def test_sglang_runs_deepseek_on_16_gpus_as_ranks_or_tensor_parallel():
    found = {(one.layout.instances, one.layout.ranks, one.layout.tensor) for one in feasible(DEEPSEEK, H20, SGLANG)}
    assert {(1, 16, False), (1, 16, True), (2, 8, True)} == found
    by_ranks = {one.layout: one.ranks for one in feasible(DEEPSEEK, H20, SGLANG)}
    assert by_ranks[RANKS] == 16
    assert by_ranks[TENSOR] == 1


def test_what_runs_from_the_store_is_not_limited_by_the_device():
    resident, streamed = (deployment(DEEPSEEK, H20, BATCHGEN, regime=Regime(kv=kv)) for kv in (INCLUSIVE, STREAMED))
    assert resident.running_tokens == resident.device_tokens
    assert streamed.running_tokens == streamed.store_tokens > streamed.device_tokens


def test_engines_that_keep_windows_alone_hold_more_tokens():
    model = model_named("gpt-oss-120b")
    every, windows = (rank_memory(model, cluster_named("h100x1"), one, Layout(), Regime()) for one in (BATCHGEN, VLLM))
    assert (every.kv_token, every.kv_sequence) == (model.kv_token_bytes, 0)
    assert windows.kv_token == every.kv_token / 2  # every second layer has a window
    assert windows.kv_sequence == 128 * every.kv_token / 2
    left = windows.total - windows.weights - windows.reserve
    assert windows.device_tokens == left // windows.kv_token
    assert rank_memory(model, cluster_named("h100x1"), BATCHGEN, Layout(), Regime()) == every


def test_models_without_a_window_are_kept_whole_by_all_engines():
    assert kv_bytes(DEEPSEEK, SGLANG) == kv_bytes(DEEPSEEK, BATCHGEN) == (DEEPSEEK.kv_token_bytes, 0)
    all_windows = replace(MIXTRAL, layers=replace(MIXTRAL.layers, window=128, window_layers=MIXTRAL.layers.num_layers))
    assert kv_bytes(all_windows, SGLANG) == (MIXTRAL.kv_token_bytes, 0)


def test_room_is_set_apart_for_the_windows_of_sequences_and_not_where_all_layers_keep_all():
    ours, theirs = (deployment("gpt-oss-20b", "h100x1", engine) for engine in (BATCHGEN, SGLANG))
    assert ours.for_rows(100) is ours
    assert theirs.sequence_tokens == 128
    assert theirs.for_rows(100).device_tokens == theirs.device_tokens - 100 * 128
    assert theirs.for_rows(1 << 30).device_tokens == 0


@settings(max_examples=30, deadline=None)
@given(more=st.integers(min_value=0, max_value=100 << 30), host=st.floats(min_value=0, max_value=4e12))
def test_more_memory_never_holds_less(more, host):
    sheet = replace(H20.sheet, driver_memory_bytes=H20.sheet.driver_memory_bytes + more)
    larger = replace(H20, sheet=sheet, host_memory_bytes=H20.host_memory_bytes + host)
    regime = Regime(kv=INCLUSIVE, prefill=DATA_PARALLEL)
    before, after = (rank_memory(DEEPSEEK, one, BATCHGEN, RANKS, regime) for one in (H20, larger))
    assert after.device_tokens >= before.device_tokens
    assert after.store_tokens >= before.store_tokens
