"""The process that profiles what surrounds the layers: runs an engine of a cut model and prints a line per sample.

Its argument is a JSON object: `engine`, the arguments of `Engine`; `rows`, the sizes of decode groups; `within_s`, the
time for all samples. Each size is run twice, with one new token and with some more: the difference is decode steps.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from sgl_batch.engine.engine import Engine
from sgl_batch.errors import SglBatchError
from sgl_batch.planner.samples import StepSample

PROMPT_TOKENS, DECODE_STEPS = 16, 24
_LAYER_PARTS = ("attention", "router", "experts")


def samples(spec: Mapping[str, Any]) -> Iterator[StepSample]:
    """Start the engine, and measure each size once the engine is warm."""
    engine = Engine(**spec["engine"])
    try:
        _answer(engine, 2, DECODE_STEPS)
        ends = time.perf_counter() + spec["within_s"]
        for rows in spec["rows"]:
            if time.perf_counter() > ends:
                return
            yield from _of_rows(engine, rows)
    finally:
        engine.shutdown()


def _of_rows(engine: Engine, rows: int) -> Iterator[StepSample]:
    short, long = _answer(engine, rows, 1), _answer(engine, rows, 1 + DECODE_STEPS)
    steps = long["decode_groups"] - short["decode_groups"]
    yield StepSample(decode=False, rows=rows, tokens=rows * PROMPT_TOKENS, seconds=short["wall_s"] - short["layers_s"])
    if steps > 0:
        of_steps = (long["decode_rows"] - short["decode_rows"]) / steps
        seconds = max(long["beside_s"] - short["beside_s"], 0.0) / steps
        yield StepSample(decode=True, rows=round(of_steps), tokens=0, seconds=seconds)


def _answer(engine: Engine, rows: int, new_tokens: int) -> dict[str, float]:
    """Answer `rows` prompts; return what changed in the engine's counters, and the seconds by where they went."""
    before, begun = engine.batch_stats(), time.perf_counter()
    prompts = [[7 + (row + token) % 61 for token in range(PROMPT_TOKENS)] for row in range(rows)]
    engine.generate(
        input_ids=prompts, sampling_params={"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    )
    wall_s, after = time.perf_counter() - begun, engine.batch_stats()
    parts = {name: seconds - before["part_s"][name] for name, seconds in after["part_s"].items()}
    counts = {name: after["counters"].get(name, 0) - before["counters"].get(name, 0) for name in _COUNTS}
    layers_s = sum(parts[name] for name in _LAYER_PARTS)
    return {**counts, "wall_s": wall_s, "layers_s": layers_s, "beside_s": parts["other"] + parts["sampling"]}


_COUNTS = ("decode_groups", "decode_rows")


def main() -> None:
    """Print the samples on what was standard output at the start; libraries print to standard error."""
    spec = json.loads(sys.argv[1])
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        try:
            for sample in samples(spec):
                answers.write(json.dumps(asdict(sample)) + "\n")
        except SglBatchError as error:
            answers.write(json.dumps({"error": str(error)}) + "\n")


if __name__ == "__main__":
    main()
