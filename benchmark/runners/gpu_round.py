"""Owns one visit of the GPU comparison: start one engine, warm it up, time one workload, perhaps with a profile.

Called by the comparing side as `PYTHON gpu_round.py SPEC RESULT`. Of tokens those of some sequences are kept: weights
are dummies, and what matters of tokens is whether sequences have become alike.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_WARM_UP_TOKENS = 16384
_WARM_UP_PROMPTS = 8
_WARM_UP_OUTPUT = 8


def warm_up_of(prompts: list[list[int]]) -> list[list[int]]:
    """Make other prompts of full length: kernels for large batches are compiled, and no cache has the timed prompts.

    At least eight, and as many as have 16,384 tokens, of those that there are.
    """
    chosen: list[list[int]] = []
    for prompt in prompts:
        if len(chosen) >= _WARM_UP_PROMPTS and sum(map(len, chosen)) >= _WARM_UP_TOKENS:
            break
        chosen.append(prompt[::-1])
    return chosen


def num_passes(counters: dict[str, int]) -> int:
    """Return our engine's forward passes by its counters, as SGLang's profiler counts them."""
    return sum(counters.get(name, 0) for name in ("prefill_groups", "decode_groups", "forwards_by_sglang"))


def begin_profile(engine: Any, asked: dict[str, Any], details: dict[str, Any], device: str) -> None:
    """Request a trace of some forward passes in the middle of the workload."""
    engine.start_profile(
        output_dir=asked["directory"],
        start_step=num_passes(details["counters"]) + asked["skip_steps"],
        num_steps=asked["num_steps"],
        activities=["CPU", "GPU"] if device == "cuda" else ["CPU"],
        with_stack=False,
        record_shapes=False,
    )


def cuda_version() -> dict[str, str]:
    """Return torch's description of CUDA and the device; empty without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return {}
    return {"cuda": str(torch.version.cuda), "gpu": torch.cuda.get_device_name()}


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Run the visit that `spec` describes."""
    from gpu_comparison.routing import MOST_ROWS, distinct_tokens

    from runners.run_round import versions
    from runners.sglang_engines import start

    began = time.perf_counter()
    runner = start(spec)
    started = time.perf_counter()
    warm_up = warm_up_of(spec["prompts"])
    runner.generate(warm_up, [_WARM_UP_OUTPUT] * len(warm_up))
    before = runner.details()
    warm = time.perf_counter()
    profile = spec.get("profile")
    if profile is not None:
        begin_profile(runner.engine, profile, before, spec["arguments"]["device"])
    begun = time.perf_counter()
    outputs = runner.generate(spec["prompts"], spec["output_lens"])
    wall = time.perf_counter() - begun
    if profile is not None:
        with contextlib.suppress(RuntimeError):  # it has ended, unless there were fewer passes than expected
            runner.engine.stop_profile()
    return {
        "start_s": started - began,
        "warm_up_s": warm - started,
        "wall_s": wall,
        "num_output_tokens": [len(output) for output in outputs],
        "some_outputs": outputs[:MOST_ROWS],
        "distinct_tokens": distinct_tokens(outputs),
        "warm_up_prompt_tokens": sum(map(len, warm_up)),
        "details_before": before,
        "details_after": runner.details(),
        "versions": {**versions(), **cuda_version()},
    }


if __name__ == "__main__":  # SGLang's child processes import this file again
    sys.path[0] = str(_HERE.parent)
    from runners.result_file import answer

    answer(measure)
