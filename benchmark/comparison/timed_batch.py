"""Owns the timing of a made-up batch in an engine that runs."""

from __future__ import annotations

import random
import time
from typing import Any

from sgl_batch.planner.workload import Workload


def batch_seconds(engine: Any, workload: Workload, draw: random.Random, vocabulary: int) -> float:
    """Return the seconds of a batch with prompts of random token ids and outputs of exactly the workload's lengths."""
    prompts = [[draw.randrange(5, vocabulary) for _ in range(one.prompt)] for one in workload.requests]
    asked = [{"max_new_tokens": one.output, "temperature": 0, "ignore_eos": True} for one in workload.requests]
    begun = time.perf_counter()
    engine.generate(input_ids=prompts, sampling_params=asked)
    return time.perf_counter() - begun
