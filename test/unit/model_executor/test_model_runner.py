"""Which forward pass computes a decode group, over stand-ins for a runner on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sgl_batch.config import BatchConfig, from_mapping
from sgl_batch.core.decode_choice import COROUTINE, DEFAULT, EAGER, MODES, SGLANG
from sgl_batch.core.plan import make_plan
from sgl_batch.core.plan_in_force import PlanInForce
from sgl_batch.core.units import FUSED, SPLIT
from sgl_batch.model_executor.model_runner import BatchModelRunner


@pytest.mark.parametrize(
    ("changed", "b_attn"),
    [
        ({}, 400),
        ({"of_several": True}, 256),
        ({"decode_kv": "streamed"}, 256),
        ({"device": "cpu"}, 256),
        ({"latent": True}, 256),
        ({"latent": True, "attention": "fa3"}, 400),
    ],
)
def test_a_single_gpu_with_resident_kv_does_not_cut_its_decode_groups(changed, b_attn):
    case = {
        "device": "cuda",
        "of_several": False,
        "decode_kv": "auto",
        "latent": False,
        "attention": "triton",
        **changed,
    }
    in_force = PlanInForce(from_mapping({"b_moe_decode": 400, "decode_kv": case["decode_kv"]}))
    runner = SimpleNamespace(
        device=case["device"],
        _rank_context=object() if case["of_several"] else None,
        _can_reenter=True,
        model=None,
        use_mla_backend=case["latent"],
        server_args=SimpleNamespace(page_size=64, attention_backend=case["attention"]),
        context=SimpleNamespace(in_force=in_force, config=in_force.config),
    )
    assert BatchModelRunner._fit_plan(runner, 512).decode.b_attn == b_attn
    assert runner.context.in_force.plan.prefill.yield_option == SPLIT
    runner.model = type("Qwen3ForCausalLM", (), {})()
    assert BatchModelRunner._fit_plan(runner, 512).prefill.yield_option == FUSED


@pytest.mark.parametrize(
    ("batch_size", "of_several", "measured", "serves"),
    [(4, False, False, True), (4, True, False, False), (300, False, False, False), (4, False, True, False)],
    ids=["one sub-batch", "ranks exchange rows", "several sub-batches", "parts are measured"],
)
def test_sglangs_graphs_serve_one_sub_batch_of_a_single_rank(batch_size, of_several, measured, serves):
    plan = make_plan(BatchConfig(), page_size=64, max_running=512)
    runner = SimpleNamespace(
        device="cuda",
        _rank_context=object() if of_several else None,
        _counters=SimpleNamespace(clock=SimpleNamespace(measures_parts=measured)),
        layer_runner=None,
        decode_cuda_graph_runner=SimpleNamespace(can_run_graph=lambda batch: True),
        context=SimpleNamespace(in_force=SimpleNamespace(plan=plan)),
    )
    group = SimpleNamespace(forward_mode=SimpleNamespace(is_cuda_graph=lambda: True), batch_size=batch_size)
    assert BatchModelRunner.graph_serves(runner, group) is serves


@pytest.mark.parametrize(("is_decode", "served"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_mode_decides_for_decode_groups_only(is_decode, served):
    graphs = object()
    runner = SimpleNamespace(
        layer_runner=SimpleNamespace(layer_graphs=graphs), _layer_graphs=graphs, graph_serves=lambda _: served
    )
    group, found = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: is_decode)), {}
    for mode in (*MODES, DEFAULT):
        BatchModelRunner.compute_decode_by(runner, mode)
        assert runner.layer_runner.layer_graphs is (None if mode == EAGER else graphs)
        found[mode] = BatchModelRunner._sglang_computes(runner, group)
    by_mode = {DEFAULT: served, COROUTINE: False, EAGER: False, SGLANG: True}
    assert found == (by_mode if is_decode else dict.fromkeys(MODES, served))
