"""Owns the least time of a workload on this machine's cores: its products, what they read, and memory that is new.

A step of decode reads nearly all weights, however few sequences it has, so that a small batch is bound by memory. And
an engine that has just started writes its KV to memory that the kernel must first provide. On a virtual machine that
can take longer than computing does, so it is counted for itself; a later batch has that memory already.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comparison.child import measured_by_child
from comparison.figures import Spread, spread
from comparison.workload import Workload, model_config
from sgl_batch.checkpoint.tensors import tensors_of
from sgl_batch.errors import ConfigError

_SPEC = {"new_bytes": 2 << 30, "read_bytes": 1 << 30, "width": 2048, "times": 20, "kept_up_s": 2.0}
_BYTES = 2  # of a number in bfloat16
_LIMIT_S = 300.0
# Parts of the names of matrices that make keys and values.
_KEYS_AND_VALUES = ("k_proj", "v_proj", "kv_a_proj", "qkv", "query_key_value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A kind of operation in all layers of a step: its arithmetic, and the bytes of weights or KV that it must read."""

    flop: float
    read_bytes: float

    def seconds(self, flop_per_s: float, read_bytes_per_s: float) -> float:
        """Return what takes longer: its products or its reads."""
        return max(self.flop / flop_per_s, self.read_bytes / read_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of decode."""

    parts: tuple[Part, ...]

    @property
    def whole(self) -> Part:
        """All of its parts at once."""
        return Part(flop=sum(one.flop for one in self.parts), read_bytes=sum(one.read_bytes for one in self.parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastWork:
    """What no engine can leave out: the products of the prompts, the steps of decode, and bytes of KV that are written.

    The steps are the fewest: all sequences that still go on take each of them together.
    """

    prompts_flop: float
    steps: tuple[Step, ...]
    kv_bytes: float

    @property
    def flop(self) -> float:
        return self.prompts_flop + sum(step.whole.flop for step in self.steps)

    def seconds(self, flop_per_s: float, read_bytes_per_s: float) -> float:
        """Return the least time where a step of decode takes as long as its products or its reads do."""
        steps = (step.whole.seconds(flop_per_s, read_bytes_per_s) for step in self.steps)
        return self.prompts_flop / flop_per_s + sum(steps)

    def seconds_in_turn(self, flop_per_s: float, read_bytes_per_s: float) -> float:
        """Return the least time where no part of a step reads while another one multiplies."""
        parts = (part.seconds(flop_per_s, read_bytes_per_s) for step in self.steps for part in step.parts)
        return self.prompts_flop / flop_per_s + sum(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Elements:
    """The elements of a checkpoint's matrices, and the share of the experts that a token is sent to.

    `last_only`: those of the last layer that a token is sent through but do not make keys and values. A prompt's token
    needs them only if another one is sampled from it. `dense_bytes`, `expert_bytes`: of a number, as it is in memory.
    """

    dense: float
    experts: float
    head: float
    share: float
    last_only: float
    dense_bytes: float
    expert_bytes: float

    @property
    def of_a_token(self) -> float:
        return self.dense + self.experts * self.share

    def parts_of(self, tokens: int) -> tuple[Part, ...]:
        """Return the products of a step with so many tokens, which choose experts at random."""
        chosen = self.experts * (1 - (1 - self.share) ** tokens)
        return (
            Part(flop=2 * tokens * self.dense, read_bytes=self.dense_bytes * self.dense),
            Part(flop=2 * tokens * self.experts * self.share, read_bytes=self.expert_bytes * chosen),
            Part(flop=2 * tokens * self.head, read_bytes=_BYTES * self.head),
        )


def least_work(model: Path, workload: Workload) -> LeastWork:
    """Return the work of a workload, by the shapes in the checkpoint.

    A token takes two operations for each weight of a matrix, of experts for the share that it is sent to, and for each
    token that it sees four for each number of a query (not counted with latent attention). The output matrix counts for
    generated tokens only, and of the last layer a prompt's tokens but its last need keys and values alone, unless
    prompts are scored.
    """
    config = model_config(model)
    elements = _elements(model, config)
    latent = config.get("kv_lora_rank")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    layers = config["num_hidden_layers"]
    kv_width = latent + config["qk_rope_head_dim"] if latent else 2 * config["num_key_value_heads"] * head_dim
    kv_bytes = _BYTES * kv_width
    seen_flop = 0 if latent else 4 * config["num_attention_heads"] * head_dim
    windows = _windows(config)
    steps = []
    for number in range(1, max(workload.output_lens)):
        lengths = [
            len(prompt) + number
            for prompt, output_len in zip(workload.prompts, workload.output_lens, strict=True)
            if output_len > number
        ]
        seen = _seen(lengths, windows)
        attention = Part(flop=seen_flop * seen, read_bytes=kv_bytes * seen)
        steps.append(Step(parts=(attention, *elements.parts_of(len(lengths)))))
    # A token sees as many as its place; `read`: those that the last layer computes.
    places = [place for prompt in workload.prompts for place in range(1, len(prompt) + 1)]
    read = places if workload.scores_prompts else [len(prompt) for prompt in workload.prompts]
    seen = _seen(places, windows[:-1]) + _seen(read, windows[-1:])
    matrices = workload.prompt_tokens * elements.of_a_token - (len(places) - len(read)) * elements.last_only
    matrices += len(read) * elements.head
    computed = workload.prompt_tokens + workload.output_tokens - len(workload.prompts)
    return LeastWork(
        prompts_flop=2 * matrices + seen_flop * seen, steps=tuple(steps), kv_bytes=float(kv_bytes * layers * computed)
    )


def _windows(config: Mapping[str, Any]) -> list[int | None]:
    """Return how many of the last tokens each layer sees; None where it sees all."""
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    kinds = config.get("layer_types") or ["sliding_attention"] * config["num_hidden_layers"]
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _seen(lengths: Sequence[int], windows: Iterable[int | None]) -> int:
    """Return how many tokens are seen in layers with these windows together, by tokens that could see `lengths`."""
    return sum(
        layers * sum(lengths if window is None else (min(length, window) for length in lengths))
        for window, layers in Counter(windows).items()
    )


def _elements(model: Path, config: Mapping[str, Any]) -> _Elements:
    dense = experts = head = embedding = last_dense = last_experts = dense_bytes = expert_bytes = 0.0
    layers = config["num_hidden_layers"]
    last = f".layers.{layers - 1}."
    # Matrices of a quantised checkpoint count as the floats that they stand for, and take the bytes in which they stay.
    tensors = tensors_of(model, layers, cpu_weights="auto") if any(model.glob("*.safetensors")) else []
    for one in tensors:
        name, is_matrix = one.name, len(one.stored.shape) >= 2 and not one.name.endswith("bias")
        elements = float(one.count) if is_matrix else 0.0  # some families have all experts in one tensor
        if "embed_tokens" in name:
            embedding += elements
        elif "lm_head" in name:
            head += elements
        elif ".experts." in name:
            experts += elements
            expert_bytes += one.num_bytes(_BYTES) * is_matrix
            last_experts += elements * (last in name)
        else:
            dense += elements
            dense_bytes += one.num_bytes(_BYTES) * is_matrix
            last_dense += elements * (last in name and not any(part in name for part in _KEYS_AND_VALUES))
    if not dense:
        raise ConfigError(f"--bound: {model} has no matrices in *.safetensors files of its own")
    share = config.get("num_experts_per_tok", 1) / (config.get("num_experts") or 1)
    return _Elements(
        dense=dense,
        experts=experts,
        head=head or embedding,
        share=share,
        last_only=last_dense + last_experts * share,
        dense_bytes=dense_bytes / dense,
        expert_bytes=expert_bytes / experts if experts else _BYTES,
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
    names = ("flop_per_s", "read_bytes_per_s", "best_read_bytes_per_s", "new_bytes_per_s")
    flops, reads, best_reads, new = (_spread_of(measured, name) for name in names)
    products_s, memory_s = work.flop / flops.median, work.kv_bytes / new.median
    least_s = work.seconds(flops.median, reads.median)
    in_turn_s = work.seconds_in_turn(flops.median, reads.median)
    shares = "; ".join(
        f"{name} {products_s / wall.median:.0%} of the products, {least_s / wall.median:.0%} with the reads, "
        f"{(least_s + memory_s) / wall.median:.0%} with the new memory too, "
        f"{(in_turn_s + memory_s) / wall.median:.0%} with parts in turn"
        for name, wall in walls.items()
    )
    return (
        f"The bound: {work.flop / 1e12:.1f} TFLOP of products take {products_s:.1f} s at "
        f"{_scaled(flops, 1e12).text(2)} TFLOP/s, the quickest of four ways of a large product in bfloat16. A step of "
        f"decode whose reads of weights and KV take longer, at {_scaled(reads, 1e9).text(1)} GB/s that large reads "
        f"keep up for {_SPEC['kept_up_s']:g} s (a single read at best: {_scaled(best_reads, 1e9).text(1)}), is bound "
        f"by these: {least_s:.1f} s; {in_turn_s:.1f} s where a step's attention, experts, other layers and output "
        f"follow one another, each as long as its own products or reads. {work.kv_bytes / 1e9:.1f} GB of KV take "
        f"{memory_s:.1f} s more at {_scaled(new, 1e9).text(1)} GB/s where memory is written for the first time, as in "
        f"a first batch. All were measured before and after each round. What was reached: {shares}."
    )


def as_json(work: LeastWork, measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return work and rates for the record."""
    read_bytes = sum(step.whole.read_bytes for step in work.steps)
    rates = [dict(one) for one in measured]
    return {"flop": work.flop, "decode_read_bytes": read_bytes, "kv_bytes": work.kv_bytes, "rates": rates}


def _spread_of(measured: Sequence[Mapping[str, Any]], name: str) -> Spread:
    found = spread(one[name] for one in measured)
    assert found is not None, "rates are measured before the first round"
    return found


def _scaled(value: Spread, unit: float) -> Spread:
    parts = {"median": value.median, "low": value.low, "high": value.high}
    return Spread(**{name: part / unit for name, part in parts.items()}, count=value.count)
