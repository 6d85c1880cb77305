"""The regimes of the GPU comparison: sizes fit the machine, both engines get the same memory, bad flags are refused."""

from __future__ import annotations

import dataclasses
import json
from functools import cache

import gpu
import pytest
from comparison.machine import gpu_text
from gpu import gpu_bytes, main, parse, read_arguments
from gpu_comparison.cases import Role
from gpu_comparison.machine_rates import Machine
from gpu_comparison.regimes import REGIMES, build, names_of
from gpu_comparison.run_setup import OURS, STOCK, RunSetup
from gpu_comparison.shapes import LEAST_HEAD_DIM, qwen3_30b, tiny
from gpu_comparison.sizes import FULL

from sgl_batch.config import field_names
from sgl_batch.errors import ConfigError

GIB = 1 << 30
H200 = 143771 << 20
HOST = 128 * GIB


def run_setup(*, on_gpu: bool) -> RunSetup:
    return RunSetup(on_gpu=on_gpu, tiny=not on_gpu, backend="triton", gpu_bytes=H200, extra={OURS: {}, STOCK: {}})


@cache
def regime(name: str, *argv: str, on_gpu: bool = True):
    return build(name, run_setup(on_gpu=on_gpu), parse([*argv]))


def test_the_shape_has_the_parameters_of_the_released_model():
    assert qwen3_30b(48).weight_bytes == pytest.approx(2 * 30.53e9, rel=0.001)
    assert qwen3_30b(48).kv_token_bytes == 98304


def test_a_shape_is_a_directory_with_a_config_that_transformers_reads(tmp_path):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(tiny(3).write(tmp_path / "model"))
    assert (config.model_type, config.num_hidden_layers, config.num_experts) == ("qwen3_moe", 3, 8)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]


def test_the_kv_pool_is_twelve_gib_and_a_tenth_of_the_kv_needed():
    kv = FULL["kv"]
    assert kv.pool_tokens * qwen3_30b(kv.layers).kv_token_bytes == 12 * GIB
    assert kv.need_tokens == 10 * kv.pool_tokens


@pytest.mark.parametrize("name", FULL)
def test_a_regime_at_full_size_fits_the_host_and_the_device(name):
    sizes, shape = FULL[name], qwen3_30b(FULL[name].layers)
    host = sizes.store_bytes + (shape.all_expert_bytes if name == "weights" else 0)
    assert host < 0.7 * HOST
    resident = shape.weight_bytes if name != "weights" else 0
    pool = sizes.pool_tokens or (0 if name in ("tight", "weights") else sizes.need_tokens)
    assert resident + pool * shape.kv_token_bytes < 0.88 * H200


@pytest.mark.parametrize("name", REGIMES)
def test_both_engines_have_the_same_attention_backend_and_weights_on_a_gpu(name):
    cases = regime(name).cases
    assert {case.arguments["attention_backend"] for case in cases} == {"triton"}
    assert len({case.arguments["load_format"] for case in cases}) == 1
    assert all(case.lacking is None for case in cases)
    assert {case.arguments["random_seed"] for case in cases} == {0}


@pytest.mark.parametrize("name", REGIMES)
@pytest.mark.parametrize("on_gpu", [True, False])
def test_every_argument_is_one_that_its_engine_has(name, on_gpu):
    from sgl_batch.sglang_adapter.processes import argument_names

    for case in regime(name, on_gpu=on_gpu).cases:
        known = {*argument_names(), *(field_names() if case.engine == OURS else ())}
        assert case.arguments.keys() <= known, case.name


@pytest.mark.parametrize("name", REGIMES)
def test_ours_is_first_and_there_are_peers_to_sweep(name):
    cases = regime(name).cases
    assert cases[0].role is Role.OURS
    assert len({case.name for case in cases}) == len(cases)
    assert sum(case.role is Role.PEER for case in cases) >= 2


@pytest.mark.parametrize("name", ["kv", "tight", "prefill", "resident"])
def test_ours_has_overlap_and_graphs_on_and_then_each_and_both_off(name):
    ours = [case for case in regime(name).of_role(Role.OURS) if case.arguments["decode_forward"] == "default"]
    switched = [(case.arguments["overlap"], "decode_graph_memory" in case.arguments) for case in ours]
    assert switched == [("on", True), ("on", False), ("off", True), ("off", False)]
    assert ["disable_cuda_graph" in case.arguments for case in ours] == [False, True, False, True]
    on_cpu = regime(name, on_gpu=False).of_role(Role.OURS)
    assert [case.lacking is None for case in on_cpu][-4:] == [False, True, False, True]


def test_resident_decode_is_compared_as_the_self_check_chooses():
    assert regime("resident").cases[0].arguments["decode_forward"] == "measure"


def test_streamed_experts_are_compared_with_overlap_and_without():
    assert [case.arguments["overlap"] for case in regime("weights").of_role(Role.OURS)] == ["on", "off"]


def test_long_prompts_have_their_experts_by_deepgemm_and_stock_may_have_it_too():
    cases = regime("prefill").cases
    assert {case.arguments["expert_runner"] for case in cases if case.role is Role.OURS} == {"deepgemm"}
    assert "deep_gemm" in {case.arguments.get("moe_runner_backend") for case in cases if case.role is Role.PEER}
    assert all("deepgemm" not in case.arguments.values() for case in regime("prefill", on_gpu=False).cases)


def test_the_pool_is_the_same_in_every_case_of_kv():
    cases = regime("kv").cases
    assert {case.arguments["max_total_tokens"] for case in cases} == {131072}
    assert {case.role for case in cases if "kv_store_bytes" in case.arguments} == {Role.OURS}


def test_streamed_experts_and_kv_fit_the_budget_that_stock_has_as_a_fraction():
    cases = regime("weights").cases
    shape, ours = qwen3_30b(32), cases[0].arguments
    assert ours["mem_fraction_static"] == pytest.approx(24 * GIB / H200, abs=0.001)
    others = shape.weight_bytes - shape.all_expert_bytes + ours["max_total_tokens"] * shape.kv_token_bytes
    assert 2 * shape.experts * shape.expert_bytes < ours["weight_memory"] < 24 * GIB - others
    offloaded = [case.arguments["cpu_offload_gb"] for case in cases if "cpu_offload_gb" in case.arguments]
    assert all(shape.weight_bytes - gib * GIB + others < 34 * GIB for gib in offloaded)
    assert cases[-1].role is Role.REFERENCE


@pytest.mark.parametrize("name", ["accumulation", "accumulation-graphs"])
def test_accumulation_differs_from_its_peers_only_in_the_group(name):
    plan, shut, equal = regime(name).cases
    assert {**shut.arguments, "accumulate": True} == {**plan.arguments, "accumulate": True}
    differing = {key for key in plan.arguments if plan.arguments[key] != equal.arguments[key]}
    assert differing == {"b_moe_decode"}
    assert plan.arguments.keys() == equal.arguments.keys()
    assert equal.arguments["b_moe_decode"] == equal.arguments["b_attn_decode"] == plan.arguments["b_attn_decode"]
    assert {case.engine for case in (plan, shut, equal)} == {OURS}
    assert {case.arguments["decode_forward"] for case in (plan, shut, equal)} == {"coroutine"}
    assert plan.arguments["max_running_requests"] > plan.arguments["b_moe_decode"]
    assert plan.arguments["max_total_tokens"] >= FULL[name].need_tokens
    assert ("decode_graph_memory" in plan.arguments) == (name == "accumulation-graphs")


@pytest.mark.parametrize("name", REGIMES)
def test_a_gpu_takes_the_tiny_scale_too(name):
    given = RunSetup(on_gpu=True, tiny=True, backend="triton", gpu_bytes=H200, extra={OURS: {}, STOCK: {}})
    cases = build(name, given, parse([])).cases
    assert all(case.lacking is None for case in cases)
    assert all(case.arguments["max_total_tokens"] <= 16384 for case in cases)
    assert all(case.arguments.get("mem_fraction_static", 0.5) >= 0.5 for case in cases)


def test_no_shape_has_heads_too_narrow_for_a_gpu():
    assert tiny(2).head_dim >= LEAST_HEAD_DIM
    with pytest.raises(AssertionError, match="do not run on a GPU"):
        dataclasses.replace(tiny(2), head_dim=32)


def test_cases_are_named_with_commas_each_once():
    assert names_of("kv, tight,kv") == ["kv", "tight"]
    assert names_of(parse([]).cases) == list(REGIMES)


def test_gpu_features_of_stock_sglang_are_listed_as_lacking_on_a_cpu():
    lacking = {case.name for name in REGIMES for case in regime(name, on_gpu=False).cases if case.lacking is not None}
    assert {"stock, hierarchical cache", "stock, layer groups offloaded"} <= lacking
    assert all(case.arguments["device"] == "cpu" for case in regime("kv", on_gpu=False).cases)


def test_flags_choose_sizes_and_peers_and_layers_take_the_kv_along():
    chosen = regime("kv", "--layers", "24", "--num-prompts", "100", "--peers", "defaults")
    assert [case.name for case in chosen.of_role(Role.PEER)] == ["stock, its defaults"]
    assert "6.00 GiB" in chosen.title
    assert len(chosen.workload.prompts) == 100


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--device", "cpu"], "--scale is full, which is for a GPU"),
        (["--device", "cpu", "--scale", "tiny", "--rounds", "0"], "--rounds is 0"),
        (["--device", "cpu", "--scale", "tiny", "--minutes", "0"], "--minutes is 0.0"),
        (["--device", "cpu", "--scale", "tiny", "--layers", "0"], "--layers is 0"),
        (["--device", "cpu", "--scale", "tiny", "--cases", "kv,decode"], "--cases has 'decode'"),
        (["--device", "cpu", "--scale", "tiny", "--cases", ","], "--cases names none"),
        (["--device", "cpu", "--scale", "tiny", "--output-len", "300"], "and kv has room for 256"),
        (["--device", "cpu", "--scale", "tiny", "--peers", "vllm"], "--peers names 'vllm'"),
        (["--device", "cpu", "--scale", "tiny", "--stock-arg", "x"], "--stock-arg is 'x'"),
    ],
)
def test_a_bad_argument_ends_the_command_with_one_line(argv, message, capsys, tmp_path):
    assert main([*argv, "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_visits_beyond_the_time_limit_are_reported_as_not_run(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gpu, "measure_machine", lambda *_, **__: Machine(fault="not measured in this test"))
    argv = ["--cases", "weights,resident", "--device", "cpu", "--scale", "tiny", "--minutes", "0.01"]
    assert main([*argv, "--out", str(tmp_path)]) == 2
    report = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in report.splitlines() if line.startswith("| ")]
    assert [(row[0], row[-1]) for row in rows[2:]] == [
        ("weights", "not run"),
        ("weights", "not run"),
        ("resident", "not run"),
    ]
    assert "- rates could not be measured: not measured in this test" in report
    assert (tmp_path / "report.md").read_text(encoding="utf-8") == report.rstrip("\n") + "\n"
    [line] = (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["kind"] == "run"


def test_a_budget_without_room_for_two_layers_of_experts_is_refused():
    with pytest.raises(ConfigError, match="less than two layers'"):
        regime("weights", "--num-prompts", "1600")


def test_arguments_are_json_where_they_parse_as_such():
    assert read_arguments("--stock-arg", ["a=1", "b=x y", "c=true"]) == {"a": 1, "b": "x y", "c": True}


def test_the_memory_of_the_first_gpu_is_read_from_nvidia_smi():
    line = gpu_text("NVIDIA H200, 143771 MiB, 580.95.05")
    assert line == "NVIDIA H200, 143771 MiB, driver 580.95.05"
    assert gpu_bytes([line]) == H200
    assert gpu_bytes([]) == 0


def test_a_users_argument_overrides_those_of_a_regime():
    extra = {OURS: {"b_moe_decode": 7}, STOCK: {}}
    given = RunSetup(on_gpu=True, tiny=False, backend="fa3", gpu_bytes=H200, extra=extra)
    cases = build("kv", given, parse([])).cases
    assert {case.arguments.get("b_moe_decode") for case in cases} == {7, None}
    assert {case.arguments["attention_backend"] for case in cases} == {"fa3"}
