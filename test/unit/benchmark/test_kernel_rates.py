"""The kernels' benchmark: torch's products equal ours, rates are paired by round, and the command reports."""

from __future__ import annotations

import json

import cpu_kernels
import pytest
import torch
from kernel_rates import memory_probe, product_work, report, work
from kernel_rates.shapes import Shapes, shapes_of

from sgl_batch.errors import ConfigError
from sgl_batch.layers.moe.cpu_experts import combined_experts
from sgl_batch.sglang_adapter.child_processes import THREAD_ENVIRONMENT

SMALL = Shapes(hidden=64, inter=32, experts=8, top_k=2, q_heads=4, kv_heads=2, head_dim=32, vocabulary=96)


def timed(table: str, by: str, seconds: list[float], *, flops: float = 0.0, num_bytes: float = 0.0) -> work.Timed:
    about = work.Work(table=table, row="row", by=by, flops=flops, num_bytes=num_bytes, run=lambda: None)
    return work.Timed(work=about, seconds=seconds)


def test_every_expert_gets_the_same_number_of_rows_and_no_token_one_twice():
    _, ids = product_work.balanced_routing(12, SMALL)
    assert torch.bincount(ids.flatten()).tolist() == [3] * 8
    assert all(len(set(row)) == 2 for row in ids.tolist())


def test_grouped_mm_computes_the_experts_that_it_is_measured_against():
    x = torch.randn(24, 64).bfloat16()
    w13, w2 = torch.randn(8, 64, 64).bfloat16() / 8, torch.randn(8, 64, 32).bfloat16() / 6
    routing = product_work.balanced_routing(24, SMALL)
    expected, _ = combined_experts(x.float(), w13.float(), w2.float(), *routing)
    found = product_work.grouped_mm_experts(x, w13, w2, *routing).float()
    assert float((found - expected).norm() / expected.norm()) < 0.02


def test_shares_are_of_the_fastest_ceiling_of_the_same_round():
    runs = [
        timed("product", "a", [1.0, 2.0], flops=100e9),
        timed("product", "b", [4.0, 4.0], flops=100e9),
        timed("read", "a", [1.0, 1.0], num_bytes=10e9),
        timed("experts", "sgl_batch", [1.0, 1.0], flops=50e9, num_bytes=1e9),
        timed("experts", "other", [2.0, 4.0], flops=50e9, num_bytes=1e9),
    ]
    ceilings = report.ceilings_of(runs)
    rates = report.rates_of(runs, ceilings)
    ours, other = rates[3], rates[4]
    assert ceilings.product_by == "a"
    assert (ours.product_share.low, ours.product_share.high) == (0.5, 1.0)
    assert ours.read_share.median == pytest.approx(0.1)
    assert (ours.roofline.low, ours.roofline.high) == (0.5, 1.0)
    assert ours.slower_than_ours is None
    assert (other.slower_than_ours.low, other.slower_than_ours.high) == (2.0, 4.0)


def test_decode_is_compared_with_what_reads_pages_alone():
    runs = [
        timed("product", "a", [1.0, 1.0], flops=100e9),
        timed("read", "a", [1.0, 1.0], num_bytes=40e9),
        timed("page read", "early", [1.0, 2.0], num_bytes=20e9),
        timed("page read", "late", [4.0, 4.0], num_bytes=20e9),
        timed("decode attention", "sgl_batch", [1.0, 1.0], num_bytes=8e9),
        timed("prefill attention", "sgl_batch", [1.0, 1.0], num_bytes=8e9),
    ]
    decode, prefill = report.rates_of(runs, report.ceilings_of(runs))[4:]
    assert (decode.page_share.low, decode.page_share.high) == (pytest.approx(0.4), pytest.approx(0.8))
    assert prefill.page_share is None


def test_pages_are_read_in_every_way_and_lines_go_there_and_back():
    works = [*memory_probe.page_reads(256, 1 << 14), *memory_probe.line_exchange()]
    assert [one.num_bytes for one in works[:3]] == [1 << 14] * 3
    assert all(found.seconds[0] > 0 for found in work.measure(works, rounds=1, sample_s=0.001, say=lambda _: None))


def test_without_a_compiler_the_reason_and_the_remedy_are_said(monkeypatch):
    memory_probe._program.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"no-such-compiler does not compile .* name yours in CXX"):
        next(memory_probe.page_reads(256, 512))


def test_a_checkpoint_without_experts_or_with_latents_is_refused_with_the_reason(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64}))
    with pytest.raises(ConfigError, match="moe_intermediate_size"):
        shapes_of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"n_routed_experts": 64, "kv_lora_rank": 32}))
    with pytest.raises(ConfigError, match="latent attention"):
        shapes_of(tmp_path)


HEADS = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    "config",
    [
        {"num_experts": 8, "moe_intermediate_size": 32, "intermediate_size": 96, "head_dim": None},
        {"num_local_experts": 8, "intermediate_size": 32, "num_key_value_heads": 4, "head_dim": 16},
        {"n_routed_experts": 8, "moe_intermediate_size": 32, "intermediate_size": 96},
    ],
    ids=["qwen2_moe", "mixtral", "glm4_moe"],
)
def test_families_that_name_their_sizes_differently_are_read_alike(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps({**HEADS, **config}))
    expected = Shapes(hidden=64, inter=32, experts=8, top_k=2, q_heads=4, kv_heads=4, head_dim=16, vocabulary=100)
    assert shapes_of(tmp_path) == expected


def test_the_command_prints_every_table_and_writes_every_round(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(product_work, "_SIDE", 256)
    monkeypatch.setattr(product_work, "_READ_BYTES", 1 << 20)
    for name, value in THREAD_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    record = tmp_path / "record.json"
    command = ["--rounds", "2", "--sample-s", "0.001", "--tokens-per-expert", "1", "--rows", "2", "--contexts", "64"]
    command += ["--batches", "2", "--layers", "1", "--vocabulary", "4000", "--json", str(record)]
    assert cpu_kernels.main(command) == 0
    text, figures = capsys.readouterr().out, json.loads(record.read_text())
    tables = {rate["table"] for rate in figures["rates"]}
    assert {
        "product",
        "read",
        "page read",
        "experts",
        "decode attention",
        "prefill attention",
        "choice of tokens",
    } < tables
    assert all(len(rate["seconds"]) == 2 for rate in figures["rates"])
    assert all(f"\n{table}\n" in text for table in tables.difference(report.LIMITS))
    assert "of page read" in text
