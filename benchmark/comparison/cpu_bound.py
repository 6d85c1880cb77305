"""Owns the least time of a workload on this machine's cores: its products, and memory written for the first time.

An engine that has just started writes its KV to memory that the kernel must first provide. On a virtual machine that
can take longer than computing does, so it is counted for itself; a later batch has that memory already.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from comparison.child import measured_by_child
from comparison.figures import Spread, spread
from comparison.workload import Workload, model_config
from sgl_batch.errors import ConfigError

_SPEC = {"new_bytes": 2 << 30, "width": 2048, "times": 20}
_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastWork:
    """What no engine can leave out: operations of the matrix products, and bytes of KV that are written."""

    flop: float
    kv_bytes: float


def least_work(model: Path, workload: Workload) -> LeastWork:
    """Return the work of a workload, by the shapes in the checkpoint.

    A token takes two operations for each weight of a matrix; of experts, for the share that a token is sent to. The
    output matrix counts for generated tokens only, and attention's products with KV not at all.
    """
    config = model_config(model)
    share = config.get("num_experts_per_tok", 1) / (config.get("num_experts") or 1)
    matrices = head = embedding = 0.0
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                shape = tensors.get_slice(name).get_shape()
                elements = float(shape[0] * shape[1]) if len(shape) == 2 else 0.0
                if "embed_tokens" in name:
                    embedding += elements
                elif "lm_head" in name:
                    head += elements
                else:
                    matrices += elements * (share if ".experts." in name else 1.0)
    if not matrices:
        raise ConfigError(f"--bound: {model} has no matrices in *.safetensors files of its own")
    computed = workload.prompt_tokens + workload.output_tokens - len(workload.prompts)
    heads, width = config["num_key_value_heads"], config.get("head_dim")
    width = width or config["hidden_size"] // config["num_attention_heads"]
    return LeastWork(
        flop=2 * (computed * matrices + workload.output_tokens * (head or embedding)),
        kv_bytes=2.0 * 2 * computed * config["num_hidden_layers"] * heads * width,
    )


class Rates:
    """The rates of the cores, measured in a process of its own before and after each round."""

    def __init__(self, out: Path, threads: int | None) -> None:
        self._out = out
        self._threads = threads or len(os.sched_getaffinity(0))
        self.measured: list[dict[str, Any]] = []

    def measure(self) -> None:
        """Measure once more. Raises ConfigError where the process fails."""
        spec = {**_SPEC, "threads": self._threads}
        measured, fault = measured_by_child(
            "cpu-rates", spec, self._out, runner="cpu_rates.py", limit_s=_LIMIT_S, threads=self._threads
        )
        if fault is not None:
            raise ConfigError(f"--bound: the machine's rates could not be measured: {fault}")
        self.measured.append(measured)


def bound_text(work: LeastWork, measured: Sequence[Mapping[str, Any]], walls: Mapping[str, Spread]) -> str:
    """Return the bound and each engine's share of it, by the medians of the rates and of the engines' seconds."""
    flops, new = (_spread_of(measured, name) for name in ("flop_per_s", "new_bytes_per_s"))
    products_s, memory_s = work.flop / flops.median, work.kv_bytes / new.median
    shares = "; ".join(
        f"{name} {products_s / wall.median:.0%}, with the memory {(products_s + memory_s) / wall.median:.0%}"
        for name, wall in walls.items()
    )
    return (
        f"The bound: {work.flop / 1e12:.1f} TFLOP of products take {products_s:.1f} s at "
        f"{_scaled(flops, 1e12).text(2)} TFLOP/s, the quickest of three ways of a large product in bfloat16. "
        f"{work.kv_bytes / 1e9:.1f} GB of KV take {memory_s:.1f} s more at {_scaled(new, 1e9).text(1)} GB/s where "
        "memory is written for the first time, as in a first batch. Both were measured before and after each round. "
        f"Shares of the bound that were reached: {shares}."
    )


def as_json(work: LeastWork, measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return work and rates for the record."""
    return {"flop": work.flop, "kv_bytes": work.kv_bytes, "rates": [dict(one) for one in measured]}


def _spread_of(measured: Sequence[Mapping[str, Any]], name: str) -> Spread:
    found = spread(one[name] for one in measured)
    assert found is not None, "rates are measured before the first round"
    return found


def _scaled(value: Spread, unit: float) -> Spread:
    parts = {"median": value.median, "low": value.low, "high": value.high}
    return Spread(**{name: part / unit for name, part in parts.items()}, count=value.count)
