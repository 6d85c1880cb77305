"""A model larger than memory: the bytes of the limit that each engine gets, and the tables of its rounds."""

from __future__ import annotations

from pathlib import Path

import pytest
from large_model.measure import Group, Run, Workload, _memory, check
from large_model.report import bound_share, bound_table, memory_table, speed_table, tokens_per_s

from sgl_batch.errors import ConfigError
from sgl_batch.weights.disk_rate import disk_rate

GIB = 1 << 30
CONFIG = {
    "num_hidden_layers": 20,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_size": 1024,
    "moe_intermediate_size": 768,
}


def workload(**changes) -> Workload:
    given = {
        "model": Path("model"),
        "config": CONFIG,
        "limit_bytes": 4 * GIB,
        "groups": [16, 512],
        "input_len": 16,
        "output_len": 8,
        "threads": 4,
        "limit_s": 60.0,
    }
    return Workload(**{**given, **changes})


def group(engine: str, size: int, wall_s: float, number: int = 0, **more) -> Group:
    return Group(engine=engine, round=number, size=size, wall_s=wall_s, disk_bytes_per_s=1e9, **more)


def run(engine: str, groups: list[Group], fault: str | None = None) -> Run:
    return Run(engine=engine, round=0, groups=groups, peak_bytes=3 * GIB, start_s=10.0, fault=fault)


def test_a_larger_group_leaves_fewer_bytes_of_the_limit_to_accelerates_weights():
    few, many = (_memory(workload(), "accelerate", size)["weight_memory"] for size in (16, 2048))
    assert 0 < many < few < 4 * GIB


def test_the_mapped_baseline_has_the_same_pool_and_no_streaming():
    ours, mapped = (_memory(workload(), engine, 512)["engine"] for engine in ("sgl_batch", "mapped"))
    assert {**mapped, **{name: ours[name] for name in ours.keys() - mapped.keys()}} == ours
    assert ours.keys() - mapped.keys() == {"weights", "weight_read_threads"}


def test_an_unknown_engine_is_named():
    with pytest.raises(ConfigError, match="--engines names 'vllm'; known: sgl_batch"):
        check(workload(), ["vllm"])


def test_the_bound_is_the_time_to_read_the_bytes_needed():
    done = group("sgl_batch", 16, 20.0, needed_bytes=15 * 10**9)
    assert bound_share(done) == pytest.approx(0.75)
    assert tokens_per_s(done, 8) == pytest.approx(6.4)


def test_ours_is_compared_with_the_best_of_the_others():
    runs = [
        run("sgl_batch", [group("sgl_batch", 16, 10.0), group("sgl_batch", 512, 20.0)]),
        run("mapped", [group("mapped", 16, 15.0), group("mapped", 512, 60.0)]),
        run("accelerate", [group("accelerate", 16, 12.0)], fault="timed out after 60 s"),
    ]
    lines = speed_table(workload(), runs, ["sgl_batch", "mapped", "accelerate"]).splitlines()
    assert "1.2 (accelerate)" in lines[2]
    assert "3.0 (mapped)" in lines[3]
    assert "timed out after 60 s" in memory_table(runs, ["accelerate"])
    assert len(bound_table(workload(), runs).splitlines()) == 4


def test_the_disk_is_read_up_to_the_requested_number_of_bytes(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(bytes(9 << 20))
    assert disk_rate([file], threads=2, most_bytes=6 << 20) > 0
