"""Clusters: what their figures are, where each is from, and what GPUs share."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files

import pytest

from sgl_batch.errors import ConfigError
from sgl_batch.planner.data_sheets import DATA_SHEETS
from sgl_batch.simulator.cluster.assumed import Assumed
from sgl_batch.simulator.cluster.engines import ENGINES, engine_named
from sgl_batch.simulator.cluster.hardware import cluster_named


def test_a_cluster_is_named_by_its_gpu_and_how_many():
    h20 = cluster_named("H20x16")
    assert (h20.sheet.name, h20.gpus, h20.gpus_per_node, h20.node_gpus) == ("H20", 16, 8, 8)
    names = {name: cluster_named(f"{name}x1").sheet.name for name in ("h100", "a100", "a5000", "l40s", "a10040g")}
    assert names == {
        "h100": "H100-SXM",
        "a100": "A100-80G",
        "a5000": "RTX-A5000",
        "l40s": "L40S",
        "a10040g": "A100-40G",
    }
    for name in ("h20", "h20x0", "tpux8"):
        with pytest.raises(ConfigError, match="h20x16"):
            cluster_named(name)


def test_every_gpu_of_the_table_has_a_data_sheet_and_a_reason_for_each_guess():
    table = json.loads((files("sgl_batch.simulator.cluster") / "hardware" / "hosts.json").read_text("utf-8"))
    assert set(table["gpus"]) <= {sheet.name for sheet in DATA_SHEETS}
    for name in table["gpus"]:
        cluster = cluster_named(f"{name}x1")
        assert all(value.why for value in cluster.assumed().values())
        assert cluster.reach.high < 1


def test_gpus_of_a_node_share_its_uplinks_and_its_memory():
    one, eight = cluster_named("h20x1"), cluster_named("h20x8")
    assert one.link_bytes_per_s == 64e9
    assert eight.link_bytes_per_s == eight.host_memory_bytes_per_s.best / 8 < 64e9
    shared = replace(one, gpus=2, gpus_per_uplink=Assumed(2, 1, 2))
    assert shared.link_bytes_per_s == 32e9
    assert cluster_named("h20x64").link_bytes_per_s == eight.link_bytes_per_s


def test_every_assumed_number_moves_to_its_ends_alone():
    for holder in (*ENGINES, cluster_named("h20x16")):
        moved = list(holder.variants())
        uncertain = [
            name for name, value in holder.assumed().items() for end in (value.low, value.high) if end != value.best
        ]
        assert sorted(name for name, _, _ in moved) == sorted(uncertain)
        for name, end, one in moved:
            value = holder.assumed()[name]
            assert one.assumed()[name].best == (value.low if end == "low" else value.high)
            others = {key: number for key, number in one.assumed().items() if key != name}
            assert others == {key: number for key, number in holder.assumed().items() if key != name}


def test_an_engine_is_found_by_its_name():
    assert engine_named("SGLang").title == "SGLang 0.5.5"
    with pytest.raises(ConfigError, match=r"flexgen.*deepspeed"):
        engine_named("llama.cpp")
