"""Owns one engine's rounds with a model larger than its memory: enters the control group, starts, times every group.

Called by the comparing side as `PYTHON large_model_round.py SPEC RESULT`; what is done is written after each group.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MIB = 1 << 20
Generate = Callable[[list[list[int]], int], list[list[int]]]


def prompts_of(size: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Random prompts, the same for every engine."""
    rng = random.Random(f"{seed} {size}")
    return [[rng.randrange(10, vocabulary) for _ in range(length)] for _ in range(size)]


def start_sgl_batch(spec: dict[str, Any]) -> tuple[Generate, Callable[[], dict[str, Any]]]:
    """Start ours: streamed weights, or the operating system's paging if the parent has hooked it in."""
    import sgl_batch

    engine = sgl_batch.Engine(model_path=spec["model"], log_level="warning", **spec["engine"])

    def generate(prompts: list[list[int]], steps: int) -> list[list[int]]:
        sampling = {"temperature": 0, "max_new_tokens": steps, "ignore_eos": True}
        return [result["output_ids"] for result in engine.generate(input_ids=prompts, sampling_params=sampling)]

    def counters() -> dict[str, Any]:
        stats = engine.batch_stats()
        return {**stats["counters"], "part_s": stats["part_s"]}

    return generate, counters


def start_accelerate(spec: dict[str, Any]) -> tuple[Generate, Callable[[], dict[str, Any]]]:
    """Start Hugging Face: accelerate offloads to disk what does not fit in memory."""
    from sgl_batch.sglang_adapter import bootstrap

    bootstrap.prepare()
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        spec["model"],
        dtype=torch.bfloat16,
        device_map="auto",
        max_memory={"cpu": spec["weight_memory"]},
        offload_folder=spec["scratch"],
    )
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def generate(prompts: list[list[int]], steps: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            tokens = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=steps,
                max_new_tokens=steps,
            )
        answers: list[list[int]] = tokens[:, ids.shape[1] :].tolist()
        return answers

    return generate, dict


STARTS = {"sgl_batch": start_sgl_batch, "mapped": start_sgl_batch, "accelerate": start_accelerate}


def main(spec_file: str, result_file: str) -> None:
    spec = json.loads(Path(spec_file).read_text(encoding="utf-8"))
    Path(spec["procs"]).write_text(str(os.getpid()), encoding="ascii")
    begun = time.perf_counter()
    generate, counters = STARTS[spec["mode"]](spec)
    done: dict[str, Any] = {"start_s": time.perf_counter() - begun, "groups": []}
    for size in spec["groups"]:
        prompts = prompts_of(size, spec["input_len"], spec["vocabulary"], spec["seed"])
        before, begun = counters(), time.perf_counter()
        outputs = generate(prompts, spec["output_len"])
        took, after = time.perf_counter() - begun, counters()
        done["groups"].append({"size": size, "wall_s": took, "outputs": outputs, "before": before, "after": after})
        Path(spec["so_far"]).write_text(json.dumps(done), encoding="utf-8")
    Path(result_file).write_text(json.dumps(done), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
