"""Owns finding which experts the tokens of finished runs chose: an engine computes them again as prompts.

Called by the comparing side as `PYTHON routing_round.py SPEC RESULT`. Choices are those of the positions from which
decode steps went on: what a step that has these sequences in it reads.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent


def choices_of(engine: Any, tokens: list[list[int]], positions: list[list[int]], layers: int, top_k: int) -> list[Any]:
    """Return experts by step, sequence, layer and choice. `positions`: by sequence, one a step."""
    import numpy as np
    import pybase64

    start = min(min(of_one) for of_one in positions)  # engines take one start for all sequences
    answers = engine.generate(
        input_ids=tokens,
        sampling_params={"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        return_routed_experts=True,
        routed_experts_start_len=start,
    )
    chosen = []
    for answer, wanted in zip(answers, positions, strict=True):
        ids = np.frombuffer(pybase64.b64decode(answer["meta_info"]["routed_experts"]), dtype=np.int32)
        chosen.append(ids.reshape(-1, layers, top_k)[[position - start for position in wanted]])
    by_step: list[Any] = np.stack(chosen, axis=1).tolist()
    return by_step


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Count the distinct experts of every run whose tokens are in `spec`."""
    from gpu_comparison.routing import distinct_experts, steps_of

    from runners.sglang_engines import start

    runner = start(spec)
    found: dict[str, Any] = {}
    for case, outputs in spec["outputs"].items():
        prompts = spec["prompts"][: len(outputs)]
        steps = steps_of(min(map(len, outputs)))
        positions = [[len(prompt) + step for step in steps] for prompt in prompts]
        # The last token of an output is never fed back.
        tokens = [prompt + output[:-1] for prompt, output in zip(prompts, outputs, strict=True)]
        choices = choices_of(runner.engine, tokens, positions, spec["layers"], spec["top_k"])
        distinct = distinct_experts(choices, spec["rows"][case])
        found[case] = {"mean": distinct.mean, "least": distinct.least, "rows": distinct.rows}
    return found


if __name__ == "__main__":  # SGLang's child processes import this file again
    sys.path[0] = str(_HERE.parent)
    from runners.result_file import answer

    answer(measure)
