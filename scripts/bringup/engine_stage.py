"""Owns one engine of a stage: start it, run prompts, keep its tokens as a reference or compare them with one.

The stage is ok only where tokens agree and the engine's counters show that it did what the stage is for.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def start(spec: dict[str, Any]) -> Any:
    """Start the engine of a spec: `stock` SGLang or `ours`."""
    arguments = {"model_path": spec["model"], "dtype": spec["dtype"], "log_level": "warning", **spec["arguments"]}
    if spec["engine"] == "stock":
        from sgl_batch.sglang_adapter.stock_engine import StockEngine

        return StockEngine(**arguments)
    from sgl_batch import Engine

    return Engine(**arguments)


def keep_reference(spec: dict[str, Any]) -> dict[str, Any]:
    """Write a reference of stock SGLang or of transformers."""
    from bringup.prompts import questions, reference_of_engine, reference_of_transformers

    model = Path(spec["model"])
    requests = questions(model)
    if spec["engine"] == "transformers":
        reference = reference_of_transformers(model, spec["dtype"], requests)
    else:
        engine = start(spec)
        try:
            reference = reference_of_engine(engine, requests)
        finally:
            engine.shutdown()
    reference.write(Path(spec["reference"]))
    return {"tokens": f"{reference.num_tokens} kept", "remark": f"of {spec['engine']}"}


def compare_with_reference(spec: dict[str, Any]) -> dict[str, Any]:
    """Compare our tokens with those of a reference; `error` says why the stage has failed."""
    from bringup.prompts import generate, questions
    from bringup.tokens import Reference, compare

    requests, reference = questions(Path(spec["model"])), Reference.read(Path(spec["reference"]))
    engine = start(spec)
    try:
        agreement = compare(generate(engine, requests), reference, spec["near_tie"])
        stats = engine.batch_stats()
    finally:
        engine.shutdown()
    counters = stats["counters"]
    print(json.dumps({"counters": counters, "choices": stats["choices"]}, indent=1))
    for difference in agreement.differences:
        print(difference)
    found: dict[str, Any] = {"tokens": agreement.text()}
    lacking = unproven(spec["proof"], counters)
    if not agreement.holds:
        found["error"] = agreement.why_not
    elif lacking is not None:
        found["error"] = lacking
    return found


def unproven(proof: dict[str, str | int], counters: dict[str, int]) -> str | None:
    """Return the counter that fails its check: each must exceed another counter, or a number."""
    for name, bound in proof.items():
        least = counters.get(bound, 0) if isinstance(bound, str) else bound
        if counters.get(name, 0) <= least:
            return f"the engine did not do what this stage is for: {name} is {counters.get(name, 0)}, not above {bound}"
    return None


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Run the stage."""
    return keep_reference(spec) if spec["keeps"] else compare_with_reference(spec)


if __name__ == "__main__":  # SGLang's child processes import this file again
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from bringup.stage_result import answer

    answer(run)
