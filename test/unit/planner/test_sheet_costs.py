"""Costs from a data sheet: the rates that bound them, what ranks exchange, and what a sheet cannot answer."""

from __future__ import annotations

from dataclasses import replace

import made_profiles as made
import pytest

from sgl_batch.errors import ConfigError
from sgl_batch.planner.data_sheets import DATA_SHEETS, sheet_named, sheet_of_gpu
from sgl_batch.planner.layouts import ONE_GPU, Layout, rank_layers
from sgl_batch.planner.model_layers import DENSE, MOE, model_layers
from sgl_batch.planner.roofline import COMPUTE, MEMORY, OVERHEAD
from sgl_batch.planner.sheet_costs import ASSUMED, DATA_SHEET, Assumptions, sheet_costs

H100 = sheet_named("H100-SXM")
ASSUMPTIONS = Assumptions()
MODEL = replace(
    made.layers(), attention_bytes=40e6, expert_bytes_each=9e6, head_bytes=600e6, prefill_flop=16384, decode_flop=16384
)


def costs(sheet=H100, model=MODEL, layout=ONE_GPU):
    return sheet_costs(sheet, rank_layers(model, layout), layout, ASSUMPTIONS)


def test_every_sheet_names_its_document_and_what_a_prediction_needs():
    for sheet in DATA_SHEETS:
        assert "NVIDIA" in sheet.source
        assert min(sheet.memory_bytes, sheet.memory_bytes_per_s, sheet.bf16_flop_per_s, sheet.pcie_bytes_per_s) > 0
        assert (sheet.nvlink_bytes_per_s is None) == (sheet.nvlink_gpus == 1)
    assert len({sheet.name.lower() for sheet in DATA_SHEETS}) == len(DATA_SHEETS)


def test_a_sheet_is_found_by_its_name_in_any_case_and_by_that_of_nvidia_smi():
    assert sheet_named("h200").name == sheet_of_gpu("NVIDIA H200, 143771 MiB").name == "H200"
    assert sheet_of_gpu("NVIDIA GeForce RTX 4090").name == "RTX-4090"


def test_unknown_hardware_is_refused_with_all_names():
    with pytest.raises(ConfigError, match="TPU-v9") as raised:
        sheet_named("TPU-v9")
    assert all(sheet.name in str(raised.value) for sheet in DATA_SHEETS)


def test_few_rows_are_bounded_by_memory_and_many_by_products():
    experts = costs().experts[MOE]
    few, many = experts.bounds(64), experts.bounds(65536)
    assert max(few, key=few.__getitem__) == MEMORY
    assert max(many, key=many.__getitem__) == COMPUTE
    least = MODEL.expert_bytes(MOE)(64) / (H100.memory_bytes_per_s * ASSUMPTIONS.memory_share)
    assert experts.at(64) == pytest.approx(least + ASSUMPTIONS.launch_s, rel=0.05)


def test_bounds_add_up_to_the_seconds():
    found = costs()
    for rows in (1, 100, 5000, 300_000):
        for module in (found.experts[MOE], found.router[MOE], found.step.decode):
            assert sum(module.bounds(rows).values()) == pytest.approx(module.at(rows))
        assert sum(found.decode_attention.bounds(rows, 1e5).values()) == pytest.approx(
            found.decode_attention.at(rows, 1e5)
        )


def test_no_module_is_faster_than_the_data_sheet():
    found, model = costs(), MODEL
    for rows in (1.0, 30.0, 700.0, 40_000.0):
        flop = model.expert_work(MOE)(rows) * 2 / model.weight_bytes
        seconds = found.experts[MOE].at(rows)
        assert seconds > model.expert_bytes(MOE)(rows) / H100.memory_bytes_per_s
        assert seconds > flop / H100.bf16_flop_per_s


def test_a_dense_layer_has_no_router():
    assert costs(model=made.layers(DENSE)).router[DENSE].at(100) == 0
    assert costs(model=made.layers(DENSE)).router[DENSE].bounds(100) == {OVERHEAD: 0}


def test_kv_is_read_at_the_rate_of_memory():
    found = costs().decode_attention
    slope = (found.at(8, 2e6) - found.at(8, 1e6)) / 1e6
    assert slope == pytest.approx(MODEL.kv_layer_bytes / (H100.memory_bytes_per_s * ASSUMPTIONS.memory_share))


def test_weights_in_fp8_take_the_rate_of_fp8():
    fp8 = replace(MODEL, expert_bytes_each=MODEL.expert_bytes_each / 2, weight_bytes=1)
    assert costs(model=fp8).experts[MOE].at(60_000) == pytest.approx(costs().experts[MOE].at(60_000) / 2, rel=0.05)
    with pytest.raises(ConfigError, match=r"FP8.*A100"):
        costs(sheet_named("A100-80G"), fp8)


def test_ranks_exchange_over_nvlink_as_far_as_it_reaches():
    labels = {
        (name, ranks): costs(sheet_named(name), layout=Layout(ranks=ranks)).exchange.label
        for name, ranks in (("H100-SXM", 8), ("H100-PCIe", 2), ("H100-PCIe", 4), ("L40S", 2), ("H100-SXM", 16))
    }
    over = {key: label.split(" at ")[0] for key, label in labels.items()}
    assert over == {
        ("H100-SXM", 8): "over NVLink",
        ("H100-PCIe", 2): "over NVLink",
        ("H100-PCIe", 4): "over PCIe",
        ("L40S", 2): "over PCIe",
        ("H100-SXM", 16): "over the network between machines",
    }
    assert all(ASSUMED in label for label in labels.values())
    assert DATA_SHEET in labels["H100-SXM", 8]
    assert DATA_SHEET not in labels["H100-SXM", 16]
    assert costs().exchange is None


def test_every_assumption_is_listed():
    assert set(ASSUMPTIONS.listed()) == set(Assumptions.__dataclass_fields__)


LATENT = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 100, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "intermediate_size": 128, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}  # fmt: skip


def test_the_weights_of_latent_attention_are_counted_as_they_are_stored():
    found = model_layers(LATENT, item_bytes=2, weight_bytes=2)
    stored = 48 * 64 + 48 * 4 * 24 + (32 + 8) * 64 + 32 * 4 * (16 + 16) + 4 * 16 * 64
    assert found.attention_bytes == 2 * stored
    assert (found.kv_heads, found.shared_bytes) == (1, 2 * 3 * 64 * 16)
    assert (found.prefill_flop, found.decode_flop) == (2 * 4 * (16 + 8 + 16), 2 * 4 * (2 * 32 + 8))


DEEPSEEK_R1 = {
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "vocab_size": 129280,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
    "first_k_dense_replace": 3, "intermediate_size": 18432, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip


def test_operations_and_kv_of_a_large_model_are_those_that_batchgen_counts():
    """A prompt of 2,000 tokens: about 112 ms at an H100's peak rates, and 144 MB of KV (BatchGen, costs of MIGRATE)."""
    model, tokens = model_layers(DEEPSEEK_R1, item_bytes=2, weight_bytes=1), 2048
    pairs = tokens * (tokens + 1) / 2
    attention = model.num_layers * (2 * model.attention_bytes * tokens + model.prefill_flop * pairs)
    mlps = 2 * sum(count * model.expert_work(kind)(tokens) for kind, count in model.layers.items())
    assert attention / H100.bf16_flop_per_s + mlps / H100.fp8_flop_per_s == pytest.approx(0.112, rel=0.1)
    assert model.kv_layer_bytes * model.num_layers * tokens == pytest.approx(144e6, rel=0.01)


def test_several_ranks_launch_without_graphs_and_agree_on_each_step():
    alone, ranks = costs(), costs(layout=Layout(ranks=4))
    assert ranks.router[MOE].at(1) == pytest.approx(ASSUMPTIONS.host_launch_s + ASSUMPTIONS.launch_s, rel=0.01)
    assert alone.router[MOE].at(1) < ranks.router[MOE].at(1)
    assert ranks.step.decode.at(8) - alone.step.decode.at(8) == pytest.approx(ASSUMPTIONS.agree_s, rel=0.01)


def test_memory_is_what_the_driver_reports_where_that_is_known():
    assert sheet_named("H20").usable_bytes == 97871 << 20
    assert sheet_named("RTX-4090").usable_bytes == sheet_named("RTX-4090").memory_bytes == 24e9
    for sheet in DATA_SHEETS:
        assert bool(sheet.driver_memory_bytes) == bool(sheet.driver_memory_source)
        assert sheet.usable_bytes == pytest.approx(sheet.memory_bytes, rel=0.08)
