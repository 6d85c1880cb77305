"""Makes a model's profile on this machine, in two child processes. startup/kept_profile keeps it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sgl_batch.errors import ConfigError
from sgl_batch.planner.model_layers import ModelLayers, layer_kinds
from sgl_batch.planner.samples import PassSample, Profile, StepSample
from sgl_batch.profiler.cut_model import CutModel, cut
from sgl_batch.profiler.other_load import OtherLoad
from sgl_batch.sglang_adapter.names import CPU_PLATFORM
from sgl_batch.startup.kept_profile import machine_facts

# Seconds for the samples; the start of both processes comes on top.
PASSES_S, STEPS_S, _AT_MOST_S = 20.0, 9.0, 300.0
_POOL_TOKENS, _PREFILL_TOKENS, _PAGE_SIZE = 1 << 16, 4096, 64
_POOL_BYTES = 1 << 30
_STEP_ROWS = (1, 256, 16, 64, 4)


def make_profile(
    model: Path,
    text: Mapping[str, Any],
    layers: ModelLayers,
    *,
    dtype: str,
    weight_dtype: str,
    disk_rate: float | None = None,
    passes_s: float = PASSES_S,
    steps_s: float = STEPS_S,
) -> Profile:
    """Measure a model whose config's text part is `text`. It reads no weights. Raises ConfigError where it cannot.

    `disk_rate`: bytes a second of reading the checkpoint, where it was measured. `passes_s`, `steps_s`: the time for
    samples in each of the two processes.
    """
    facts, begun = machine_facts(model, dtype=dtype, weight_dtype=weight_dtype), time.monotonic()
    if facts["gpu"] is not None:
        raise ConfigError("profiles are of CPUs so far, and this machine has a GPU: leave --profile out")
    kinds = layer_kinds(text)
    layer_bytes = layers.attention_bytes + max(layers.dense_bytes, layers.experts * layers.expert_bytes_each)
    few = cut(kinds, layer_bytes)
    with tempfile.TemporaryDirectory(prefix="sgl-batch-profile-") as directory:
        spec = _layer_spec(model, text, layers, few, dtype, weight_dtype, directory)
        others = OtherLoad()
        lines = _run("layer_process", {**spec, "within_s": passes_s})
        load = others.cores()
        rates: dict[str, float] = next((line["rates"] for line in lines if "rates" in line), {})
        passes = [PassSample(**line) for line in lines if "rates" not in line]
        spec = {**_step_spec(model, few, dtype, weight_dtype), "within_s": steps_s}
        steps = tuple(StepSample(**line) for line in _run("step_process", spec))
    return Profile(
        machine=facts,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        took_s=round(time.monotonic() - begun, 1),
        load=round(load, 2),
        passes=middle(passes),
        steps=steps,
        rates={**rates, **({} if disk_rate is None else {"disk": disk_rate})},
    )


def middle(passes: Iterable[PassSample]) -> tuple[PassSample, ...]:
    """Return the middle sample of each size, kind and number of layers, in the order in which sizes came first."""
    found: dict[object, list[PassSample]] = {}
    for one in passes:
        found.setdefault((one.decode, one.sequences, one.tokens, one.kind, one.layers), []).append(one)
    return tuple(sorted(some, key=lambda one: one.total_s)[(len(some) - 1) // 2] for some in found.values())


def _layer_spec(
    model: Path,
    text: Mapping[str, Any],
    layers: ModelLayers,
    few: CutModel,
    dtype: str,
    weight_dtype: str,
    directory: str,
) -> dict[str, Any]:
    context = int(text.get("max_position_embeddings") or _PREFILL_TOKENS)
    held = _POOL_BYTES / (layers.kv_layer_bytes * few.overrides["num_hidden_layers"])
    pool = max(int(min(_POOL_TOKENS, held)), 2 * _PREFILL_TOKENS)
    rows = min(1024, pool // _PAGE_SIZE)
    limits = {"b_moe_prefill": _PREFILL_TOKENS, "b_attn_prefill": _PREFILL_TOKENS}
    return {
        "server_args": {
            **_server_args(model, few, dtype),
            "skip_tokenizer_init": True,
            "max_total_tokens": pool + 2 * rows * _PAGE_SIZE,
            "max_running_requests": 2 * rows,
        },
        "config": {**limits, "b_moe_decode": rows, "b_attn_decode": rows, "cpu_weight_dtype": weight_dtype},
        "layers": dict(few.layers),
        "most_rows": rows,
        "most_tokens": _PREFILL_TOKENS,
        "pool_tokens": pool,
        "context": min(context, _PREFILL_TOKENS),
        "directory": directory,
    }


def _step_spec(model: Path, few: CutModel, dtype: str, weight_dtype: str) -> dict[str, Any]:
    tokens = max(_STEP_ROWS) * _PAGE_SIZE * 2
    engine = {**_server_args(model, few, dtype), "max_total_tokens": tokens, "cpu_weight_dtype": weight_dtype}
    return {"engine": {**engine, "b_moe_decode": max(_STEP_ROWS)}, "rows": _STEP_ROWS}


def _server_args(model: Path, few: CutModel, dtype: str) -> dict[str, Any]:
    return {
        "model_path": str(model),
        "dtype": dtype,
        "device": "cpu",
        "page_size": _PAGE_SIZE,
        "log_level": "error",
        "load_format": "dummy",
        "json_model_override_args": json.dumps(few.overrides),
    }


def _run(process: str, spec: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    """Run one of this room's processes; return the lines that it prints. Raises ConfigError for one that fails."""
    environment = {**os.environ, "SGLANG_PLATFORM": CPU_PLATFORM, "OPENBLAS_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", f"sgl_batch.profiler.{process}", json.dumps(spec)],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_AT_MOST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"the profile was not made: its process gave no answer within {_AT_MOST_S:g} s") from None
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    failed = next((line["error"] for line in lines if "error" in line), None)
    if failed is None and (done.returncode or not lines):
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        failed = f"its process ended with exit code {done.returncode}: {said[-1] if said else 'without a word'}"
    if failed is not None:
        raise ConfigError(f"the profile was not made: {failed}")
    return lines
