"""SGLang's profiler works with our engine: a stretch of forward passes in the middle of a run becomes a trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

import sgl_batch

pytestmark = pytest.mark.engine


def test_a_stretch_of_steps_is_written_as_a_trace(repo_root: Path, tmp_path: Path) -> None:
    engine = sgl_batch.Engine(model_path=str(repo_root / "test" / "models" / "tiny-qwen3-moe"))
    try:
        engine.start_profile(output_dir=str(tmp_path), start_step=4, num_steps=2, activities=["CPU"], with_stack=False)
        sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
        answer = engine.generate(input_ids=[5, 6, 7], sampling_params=sampling)
        stats = engine.batch_stats()["counters"]
    finally:
        engine.shutdown()
    assert len(answer["output_ids"]) == 16
    assert stats["decode_groups"] == 15
    (trace,) = tmp_path.glob("*.trace.json.gz")
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert any(name.startswith("aten::") for name in names)
