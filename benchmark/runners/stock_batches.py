"""Owns one stock SGLang engine that times batches: a line of JSON on standard input asks for each, one answers it.

A request has the lengths of a batch and how often it is to run, once after the other.

Called as `PYTHON stock_batches.py ARGUMENTS`, the engine's as JSON. Answers go to a copy of standard output, because
the engine's processes print to theirs. The first line says that the engine is ready.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

_FIRST_TOKEN = 10


def batch(engine: Any, lengths: Sequence[tuple[int, int]], draw: random.Random, vocabulary: int) -> dict[str, float]:
    """Run sequences of these prompt and output lengths. Returns seconds, processor seconds, and retractions."""
    # No prompt begins like another, so that no KV of another is of use to it.
    first = draw.sample(range(_FIRST_TOKEN, vocabulary), len(lengths))
    prompts = [
        [token, *(draw.randrange(_FIRST_TOKEN, vocabulary) for _ in range(prompt - 1))]
        for token, (prompt, _) in zip(first, lengths, strict=True)
    ]
    asked = [{"max_new_tokens": output, "temperature": 0, "ignore_eos": True} for _, output in lengths]
    busy, begun = _processor_s(), time.perf_counter()
    answers = engine.generate(input_ids=prompts, sampling_params=asked)
    seconds, busy_s = time.perf_counter() - begun, _processor_s() - busy
    # The scheduler answers this behind all messages of the batch. No KV of it is left for the next one.
    engine.flush_cache()
    short = [number for number, answer in enumerate(answers) if len(answer["output_ids"]) != lengths[number][1]]
    assert not short, f"sequences {short} have not the lengths that were asked for"
    retracted = sum(answer["meta_info"]["num_retractions"] for answer in answers)
    return {"seconds": seconds, "processor_s": busy_s, "retracted": retracted}


def _processor_s() -> float:
    """Return the processor seconds of the scheduler, which computes all passes: the busiest child of this process."""
    import psutil

    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return max(float(one.user + one.system) for one in times)


def main(arguments: dict[str, Any]) -> None:
    """Start the engine, and answer until standard input ends."""
    from sgl_batch.sglang_adapter.stock_engine import StockEngine

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    vocabulary = int(arguments.pop("vocabulary"))
    engine, draw = StockEngine(**arguments), random.Random(11)
    try:
        batch(engine, [(16, 4), (9, 4)], draw, vocabulary)
        print(json.dumps("ready"), file=answers, flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            times = [batch(engine, asked["lengths"], draw, vocabulary) for _ in range(asked["times"])]
            total = {name: sum(time[name] for time in times) for name in times[0]}
            print(json.dumps(total), file=answers, flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
