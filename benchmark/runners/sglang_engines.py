"""Owns starting and calling sgl_batch and stock SGLang, which both have sglang.Engine's interface."""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from typing import Any

# The arguments of our engine's variants.
VARIANTS: dict[str, dict[str, Any]] = {
    "sgl_batch": {},
    "sgl_batch_no_accumulate": {"accumulate": False},
    "sgl_batch_no_sharing": {"share_prefixes": False},
    "sgl_batch_16bit": {"cpu_weight_dtype": "model"},
    "sgl_batch_int8": {"cpu_weight_dtype": "int8"},
    "sgl_batch_int8_activations": {"cpu_weight_dtype": "int8", "cpu_activations": "int8"},
}


class SglangRunner:
    """An engine with sglang.Engine's interface, which generates exact numbers of tokens.

    `sampling`: temperature, top_p and top_k; without a temperature tokens are greedy. Else each prompt has a seed of
    its own, which stock takes in its deterministic mode only: otherwise it samples by the engine's `random_seed`.
    `scores_prompts`: it also asks for the log probability of each token of the prompts.
    """

    def __init__(self, engine: Any, sampling: Mapping[str, Any] | None = None, *, scores_prompts: bool = False) -> None:
        self.engine, self._sampling = engine, {"temperature": 0.0, **(sampling or {})}
        self._asked = {"return_logprob": True, "logprob_start_len": 0} if scores_prompts else {}
        atexit.register(engine.shutdown)

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        sampling: list[dict[str, Any]] = [
            {**self._sampling, "max_new_tokens": n, "ignore_eos": True} for n in output_lens
        ]
        if self._sampling["temperature"]:
            for seed, asked in enumerate(sampling):
                asked["sampling_seed"] = seed
        answers = self.engine.generate(input_ids=prompts, sampling_params=sampling, **self._asked)
        return [answer["output_ids"] for answer in answers]

    def details(self) -> dict[str, Any]:
        """Return the engine's own counters; stock has none."""
        read = getattr(self.engine, "batch_stats", None)
        if read is None:
            return {}
        stats = read()
        return {
            "part_s": stats["part_s"],
            "counters": stats["counters"],
            "plan": stats["plan"],
            "planned": stats["planned"],
            "flags": self.engine.batch_config.flat(),
        }


def start(spec: dict[str, Any]) -> SglangRunner:
    """Start the engine that the spec names: sgl_batch, a variant of it, or stock."""
    arguments = {"model_path": spec["model"], "dtype": spec["dtype"], "log_level": "error", **spec["arguments"]}
    if spec["engine"] == "stock":
        from sgl_batch.sglang_adapter.stock_engine import StockEngine

        engine: Any = StockEngine(**arguments)
    else:
        from sgl_batch import Engine

        engine = Engine(**arguments, **VARIANTS[spec["engine"]])
    return SglangRunner(engine, spec.get("sampling"), scores_prompts=spec.get("scores_prompts", False))
