"""Owns the stage that traces decode steps of one engine by torch's profiler, and reports the host's time per layer."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SEQUENCES, PROMPT, STEPS, OUTPUT = 8, 32, 16, 40


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Warm up, so that kernels are compiled and graphs captured; then trace steps of the same group."""
    from bringup.decode_trace import step_cost
    from bringup.engine_stage import start

    sys.path.append(str(ROOT / "benchmark"))
    from gpu_comparison.trace_overlap import read_trace

    layers = json.loads((Path(spec["model"]) / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    activities = ["CPU", "GPU"] if spec["arguments"]["device"] == "cuda" else ["CPU"]
    prompts = [[number + 7 * position for position in range(1, PROMPT + 1)] for number in range(SEQUENCES)]
    sampling = {"temperature": 0, "max_new_tokens": OUTPUT, "ignore_eos": True}
    with tempfile.TemporaryDirectory() as folder:
        engine = start(spec)
        try:
            for _ in range(2):
                engine.generate(input_ids=prompts, sampling_params=sampling)
            engine.start_profile(
                output_dir=folder,
                num_steps=STEPS,
                activities=activities,
                profile_by_stage=True,
                with_stack=False,
                record_shapes=False,
            )
            engine.generate(input_ids=prompts, sampling_params=sampling)
            traces = sorted(Path(folder).glob("*-DECODE.trace.json.gz"))
            cost = step_cost(read_trace(traces[0]), steps=STEPS, layers=layers) if traces else None
        finally:
            engine.shutdown()
    if cost is None:
        return {"error": f"the profiler wrote no trace of decode steps ({len(traces)} files)"}
    return {"remark": cost.text(layers)}


if __name__ == "__main__":  # SGLang's child processes import this file again
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from bringup.stage_result import answer

    answer(run)
