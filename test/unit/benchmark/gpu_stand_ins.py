"""Builders for the tests of the GPU comparison: a regime of three cases, and the settings of a run."""

from __future__ import annotations

from pathlib import Path

from comparison.workload import Workload
from gpu_comparison.cases import Case, Regime, Role, Settings
from gpu_comparison.goals import GOALS
from gpu_comparison.shapes import tiny

OURS, STORE = "sgl_batch, no store", "sgl_batch, host KV store"
SLOW, FAST = "stock, its defaults", "stock, larger chunks"
WORKLOAD = Workload(prompts=[[1, 2, 3], [4, 5]], output_lens=[4, 4], description="two prompts")


def case(name: str, role: Role = Role.PEER, lacking: str | None = None) -> Case:
    engine = "sgl_batch" if role is Role.OURS else "stock"
    return Case(name=name, role=role, engine=engine, arguments={"device": "cpu"}, lacking=lacking)


def regime(*cases: Case, **more) -> Regime:
    known = (case(OURS, Role.OURS), case(SLOW), case(FAST))
    given = {"name": "kv", "title": "t", "shape": tiny(2), "workload": WORKLOAD, "goals": GOALS["kv"]}
    return Regime(**{**given, "cases": cases or known, **more})


def settings(out: Path, **more) -> Settings:
    given = {"rounds": 3, "until_s": 600.0, "limit_s": 100.0, "device": "cpu"}
    routing = Case(name="routing", role=Role.REFERENCE, engine="sgl_batch", arguments={"device": "cpu"})
    return Settings(model=out, out=out, routing=routing, **{**given, **more})
