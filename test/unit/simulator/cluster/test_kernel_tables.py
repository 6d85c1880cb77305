"""Tables of measured kernels: which entries are believed, what lies between them, and what they replace."""

from __future__ import annotations

import pytest

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from sgl_batch.planner.layouts import Layout  # noqa: E402
from sgl_batch.simulator.cluster import costs as parts  # noqa: E402
from sgl_batch.simulator.cluster.costs import ClusterCosts  # noqa: E402
from sgl_batch.simulator.cluster.engines import BATCHGEN, SGLANG  # noqa: E402
from sgl_batch.simulator.cluster.hardware import cluster_named  # noqa: E402
from sgl_batch.simulator.cluster.kernel_tables import curve_of, surface_of, tables_of  # noqa: E402
from sgl_batch.simulator.cluster.measured import MeasuredModules, measured_modules  # noqa: E402
from sgl_batch.simulator.cluster.models import model_named  # noqa: E402
from sgl_batch.simulator.cluster.regime import Regime  # noqa: E402
from sgl_batch.simulator.work import PassWork  # noqa: E402

MIXTRAL, H200 = model_named("mixtral-8x7b"), cluster_named("h200x1")
EXPERTS = {"hidden_size": 4096, "inter_size": 14336, "topk": 2, "num_experts": 8, "moe_tp_size": 1, "moe_ep_size": 1}
EXPERTS |= {"moe_dtype": "bfloat16", "distribution": "balanced"}
LEAST_MS = 2 * 3 * 4096 * 14336 * 2 / 989.5e12 * 1e3


def write(root, path, rows):
    target = root / "systems" / "data" / "h200_sxm" / f"{path}.parquet"
    target.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), target)


def experts(root, times, version="0.5.9", sizes=(1024, 2048, 4096, 8192)):
    """Write a table whose kernels take so many times what the products take at the peak."""
    rows = [{**EXPERTS, "num_tokens": size, "latency": times * size * LEAST_MS} for size in sizes]
    write(root, f"moe/sglang/{version}/moe_perf", rows)


def modules(root, ranks=1):
    tables = tables_of("H200", ("sglang",), root)
    assert tables is not None
    return MeasuredModules(tables, MIXTRAL.layers, MIXTRAL.config, H200.sheet, ranks=ranks, exchange=SGLANG.exchange)


def test_seconds_between_entries_lie_on_a_straight_line_of_logarithms_and_beyond_in_proportion():
    curve = curve_of([(64, 1.0), (256, 4.0), (256, 5.0)])
    assert curve.at(128) == pytest.approx(2.0)
    assert (curve.at(64), curve.at(1024), curve.at(40), curve.at(10)) == (1.0, 16.0, 1.0, None)
    surface = surface_of([(100, 1, 1.0), (100, 4, 2.0), (400, 1, 4.0), (400, 4, 8.0)])
    assert surface.at(200, 1) == pytest.approx(2.0)
    assert surface.at(800, 2) == pytest.approx(2 * 4 * 2**0.5)
    assert surface.at(20, 1) is None
    assert curve_of([(1, 1.0)]) is None
    assert surface_of([(1, 1, 1.0), (1, 2, 1.0)]) is None


def test_measured_experts_count_and_ranks_share_them(tmp_path):
    experts(tmp_path, 2.0)
    assert modules(tmp_path).experts_s(2048, alone=False) == pytest.approx(2.0 * 2048 * LEAST_MS / 1e3)
    assert modules(tmp_path, ranks=4).experts_s(2048, alone=False) == pytest.approx(0.5 * 2048 * LEAST_MS / 1e3)
    assert modules(tmp_path, ranks=4).experts_s(2048, alone=True) == pytest.approx(2.0 * 2048 * LEAST_MS / 1e3)
    assert modules(tmp_path).experts_s(16, alone=True) is None


def test_entries_faster_than_the_data_sheet_are_refused_and_an_older_version_counts(tmp_path):
    experts(tmp_path, 0.5, version="0.5.14")
    assert modules(tmp_path).experts_s(2048, alone=True) is None
    experts(tmp_path, 3.0, version="0.5.10")
    found = modules(tmp_path)
    assert found.experts_s(2048, alone=True) == pytest.approx(3.0 * 2048 * LEAST_MS / 1e3)
    assert (found.tables.refused, found.tables.taken) == (4, 4)


def test_a_table_that_is_slow_throughout_is_refused(tmp_path):
    experts(tmp_path, 6.0)
    assert modules(tmp_path).experts_s(2048, alone=True) is None


def test_costs_take_measured_seconds_where_there_are_any_and_say_so(tmp_path):
    experts(tmp_path, 2.0)
    work = PassWork(prompts=1, prompt_tokens=2048, prompt_pairs=2048 * 1024, all_rows=2048)
    plain = ClusterCosts(MIXTRAL, H200, SGLANG, Layout(), Regime())
    found = ClusterCosts(MIXTRAL, H200, SGLANG, Layout(), Regime(), modules(tmp_path))
    assert found.of_exactly(work).parts[parts.EXPERTS] == pytest.approx(32 * 2.0 * 2048 * LEAST_MS / 1e3)
    assert parts.TILES not in found.of_exactly(work).parts
    assert found.of_exactly(work).parts[parts.MATRICES] == plain.of_exactly(work).parts[parts.MATRICES]
    assert "measured on H200" in found.sources[parts.EXPERTS]
    assert "measured on" not in plain.sources[parts.EXPERTS]


def test_attention_and_its_matrices_are_found_by_their_shapes(tmp_path):
    attention = {"num_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "attn_dtype": "bfloat16"}
    attention |= {"kv_cache_dtype": "bfloat16", "window_size": 0, "isl": 1}
    flop_s = 2 * 32 * 256 / 989.5e12
    prompts = [
        {**attention, "isl": length, "step": 0, "batch_size": count, "latency": 2e3 * count * length**2 / 2 * flop_s}
        for length in (1024, 4096)
        for count in (1, 8)
    ]
    write(tmp_path, "attention/sglang/0.5.9/context_attention_perf", prompts)
    byte_s = 2 * 2 * 8 * 128 / 4.8e12
    decode = [
        {**attention, "step": length - 1, "batch_size": count, "latency": 2e3 * count * length * byte_s}
        for length in (1024, 4096)
        for count in (1, 8)
    ]
    write(tmp_path, "attention/sglang/0.5.9/generation_attention_perf", decode)
    matrices = [
        {
            "n": width,
            "k": 4096,
            "gemm_dtype": "bfloat16",
            "m": rows,
            "latency": 2e3 * 2 * rows * width * 4096 / 989.5e12,
        }
        for width in (4096, 6144)
        for rows in (64, 4096)
    ]
    write(tmp_path, "gemm/sglang/0.5.9/gemm_perf", matrices)
    found = modules(tmp_path)
    assert found.decode_s(4, 4 * 2048) == pytest.approx(2 * 4 * 2048 * byte_s)
    assert found.prompts_s(2 * 4096, 2 * 4096 * 4097 / 2) == pytest.approx(2 * 2 * 4096**2 / 2 * flop_s, rel=0.01)
    assert found.matrices_s(512) == pytest.approx(2 * 2 * 512 * (4096 + 6144) * 4096 / 989.5e12)


def test_without_tables_of_a_gpu_the_roofline_counts():
    assert tables_of("H20", ("sglang",)) is None
    assert measured_modules(MIXTRAL, cluster_named("h20x8").sheet, BATCHGEN, ranks=8) is None
