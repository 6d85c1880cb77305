"""Owns how sgl_batch and stock SGLang are started and asked; both have sglang.Engine's interface."""

from __future__ import annotations

import atexit
from typing import Any

# What sets our engine's variants apart.
VARIANTS: dict[str, dict[str, Any]] = {
    "sgl_batch": {},
    "sgl_batch_no_accumulate": {"accumulate": False},
    "sgl_batch_no_sharing": {"share_prefixes": False},
    "sgl_batch_int8": {"cpu_weight_dtype": "int8"},
}


class SglangRunner:
    """An engine with sglang.Engine's interface, asked for exact numbers of greedy tokens."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        atexit.register(engine.shutdown)

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        sampling = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for n in output_lens]
        answers = self.engine.generate(input_ids=prompts, sampling_params=sampling)
        return [answer["output_ids"] for answer in answers]

    def details(self) -> dict[str, Any]:
        """What the engine counts of itself; stock counts nothing."""
        read = getattr(self.engine, "batch_stats", None)
        if read is None:
            return {}
        stats = read()
        return {
            "part_s": stats["part_s"],
            "counters": stats["counters"],
            "plan": stats["plan"],
            "flags": self.engine.batch_config.flat(),
        }


def start(spec: dict[str, Any]) -> SglangRunner:
    """The engine that the spec names: sgl_batch, a variant of it, or stock."""
    arguments = {"model_path": spec["model"], "dtype": spec["dtype"], "log_level": "error", **spec["arguments"]}
    if spec["engine"] == "stock":
        from sgl_batch.sglang_adapter.stock_engine import StockEngine

        return SglangRunner(StockEngine(**arguments))
    from sgl_batch import Engine

    return SglangRunner(Engine(**arguments, **VARIANTS[spec["engine"]]))
