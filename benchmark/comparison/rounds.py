"""Owns the order of a comparison: engines one after another, round by round, each in a fresh process.

An engine that fails or times out is not run again; its reason and its earlier rounds stay in the result.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comparison.child import is_installed, run_child
from comparison.figures import length_fault, remaining_s
from comparison.workload import Workload

# The module without which an engine cannot run.
ENGINE_MODULES = {
    "sgl_batch": "sgl_batch",
    "sgl_batch_no_accumulate": "sgl_batch",
    "sgl_batch_no_sharing": "sgl_batch",
    "sgl_batch_16bit": "sgl_batch",
    "sgl_batch_int8": "sgl_batch",
    "sgl_batch_int8_activations": "sgl_batch",
    "stock": "sglang",
    "hf": "transformers",
    "vllm": "vllm",
    "openvino": "openvino_genai",
    "llamacpp": "llama_cpp",
}
# Of these, the ones that our runners let sample, and score prompts.
SAMPLING_ENGINES = frozenset(
    name for name, module in ENGINE_MODULES.items() if module in ("sgl_batch", "sglang", "vllm")
)


def engine_of(label: str) -> str:
    """Return the engine that a label of --engine-env names, as `vllm` of `vllm-zentorch`."""
    return label.partition("-")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of every round. `sampling`: temperature, top_p and top_k; empty for greedy tokens."""

    model: Path
    dtype: str
    rounds: int
    timeout_s: float
    hf_batch: int
    full_warm_up: bool
    sampling: dict[str, float]
    threads: int | None
    python_of: dict[str, str]
    arguments_of: dict[str, dict[str, Any]]
    out: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """One engine's finished round. Times are in seconds; `wall_s` is the timed region only.

    `cpus_of_others`: cores that other programs kept busy in the timed region; None where nobody counts them.
    `cpu_s`: processor seconds of the engine's processes there; None likewise.
    """

    number: int
    start_s: float
    warm_up_s: float
    wall_s: float
    peak_rss_bytes: int
    load_average: float
    cpus_of_others: float | None
    cpu_s: float | None
    outputs: list[list[int]]
    details_before: dict[str, Any]
    details_after: dict[str, Any]
    versions: dict[str, str]


@dataclass(slots=True, kw_only=True)
class EngineRun:
    """The results of one engine; `fault` says why it is not installed or stopped running."""

    name: str
    fault: str | None = None
    rounds: list[RoundResult] = field(default_factory=list)

    def by_round(self, value: Callable[[RoundResult], float]) -> dict[int, float]:
        return {done.number: value(done) for done in self.rounds}


def run_rounds(
    engines: list[str],
    workload: Workload,
    settings: Settings,
    say: Callable[[str], None],
    runs: list[EngineRun],
    before_round: Callable[[], None],
) -> None:
    """Run every engine `settings.rounds` times, alternating, and add each result to `runs`."""
    for name in engines:
        module, python = ENGINE_MODULES[engine_of(name)], settings.python_of[name]
        installed = is_installed(python, module)
        runs.append(EngineRun(name=name, fault=None if installed else f"not installed (no module {module})"))
        if not installed:
            say(f"{name}: {runs[-1].fault} in {python}")
    took: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(1, settings.rounds + 1):
        before_round()
        for index, run in enumerate(runs):
            if run.fault is not None:
                continue
            todo = _todo(runs, index, settings.rounds - number)
            left = remaining_s(todo, took)
            eta = "" if left is None else f"; about {_clock(left)} to go for {len(todo)} runs"
            say(f"round {number}/{settings.rounds}, {run.name}: started{eta}")
            took[run.name].append(_run_one(run, number, workload, settings))
            say(f"round {number}/{settings.rounds}, {run.name}: {_outcome(run, workload)}")


def _todo(runs: list[EngineRun], index: int, later_rounds: int) -> list[str]:
    """Return the names of the runs still to do, from the run at `index` of this round on."""
    this_round = [run.name for run in runs[index:] if run.fault is None]
    return this_round + [run.name for run in runs if run.fault is None] * later_rounds


def _run_one(run: EngineRun, number: int, workload: Workload, settings: Settings) -> float:
    """Run one round, add its result or its error to `run`, and return its seconds in total."""
    stem = settings.out / f"round-{number}-{run.name}"
    spec, result = stem.with_suffix(".spec.json"), stem.with_suffix(".result.json")
    spec.write_text(json.dumps(_spec(run.name, workload, settings)), encoding="utf-8")
    load, began = os.getloadavg()[0], time.monotonic()
    end = run_child(
        settings.python_of[run.name],
        spec,
        result,
        stem.with_suffix(".log"),
        limit_s=settings.timeout_s,
        threads=settings.threads,
    )
    spec.unlink()
    if end.reason is None:
        done = json.loads(result.read_text(encoding="utf-8"))
        run.fault = length_fault(done["outputs"], workload.output_lens)
        if run.fault is None:
            run.rounds.append(
                RoundResult(
                    number=number,
                    peak_rss_bytes=end.peak_rss_bytes,
                    load_average=load,
                    **done,
                )
            )
    else:
        run.fault = end.reason
    if run.fault is not None:
        run.fault = f"failed in round {number}: {run.fault}"
    return time.monotonic() - began


def _spec(name: str, workload: Workload, settings: Settings) -> dict[str, Any]:
    return {
        "engine": engine_of(name),
        "model": str(settings.model),
        "dtype": settings.dtype,
        "prompts": workload.prompts,
        "output_lens": workload.output_lens,
        "hf_batch": settings.hf_batch,
        "full_warm_up": settings.full_warm_up,
        "sampling": settings.sampling,
        "scores_prompts": workload.scores_prompts,
        "arguments": settings.arguments_of.get(name, {}),
    }


def _outcome(run: EngineRun, workload: Workload) -> str:
    if run.fault is not None:
        return run.fault
    done = run.rounds[-1]
    rate = (workload.prompt_tokens + workload.output_tokens) / done.wall_s
    return f"{done.wall_s:.1f} s ({rate:.0f} tokens/s) after {done.start_s:.0f} s of start-up"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} min"
