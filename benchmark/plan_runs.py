#!/usr/bin/env python
"""Measures predicted against measured completion times: `sgl-batch run` over made-up batches, with given plans.

Each batch is a file of completions with prompts of token ids and outputs of exact lengths. The time is that of the
run's manifest: from the first line to the last answer, without the start of the engine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from comparison.figures import spread
from comparison.kept_profile import kept_profile
from comparison.terminal import exit_code, say
from comparison.trace_lengths import trace_lengths
from comparison.workload import model_config

from sgl_batch.errors import ConfigError
from sgl_batch.planner.candidate import Candidate, flags_of
from sgl_batch.planner.candidates import Allowed
from sgl_batch.planner.cost_model import fit
from sgl_batch.planner.followed_run import Room
from sgl_batch.planner.schedule import Prediction
from sgl_batch.planner.search import MemoryMap, predict_candidate
from sgl_batch.planner.workload import Request, Workload, parse_workload

_ROOM = MemoryMap(phases={}, room=Room(device=1 << 30))
Limits = tuple[int, int, int, int]
# A plan for each of them: tokens of prefill sub-batches and groups, sequences of decode sub-batches and groups.
WIDE, MIDDLE, NARROW = (2048, 8192, 256, 256), (512, 2048, 64, 64), (2048, 8192, 16, 16)
PLANS: tuple[Limits, ...] = (WIDE, MIDDLE, NARROW)
WORKLOADS = ("128:32x64", "32:96x64", "512:16x24", "tail:48")
DECLARED: dict[str, tuple[tuple[str, Limits], ...]] = {
    "qwen3_moe": (
        ("128:32x64", WIDE),
        ("128:32x64", NARROW),
        ("32:96x64", MIDDLE),
        ("512:16x24", MIDDLE),
        ("tail:48", WIDE),
        ("trace:24", WIDE),
    ),
    "qwen3": (
        ("128:32x64", WIDE),
        ("128:32x64", NARROW),
        ("32:96x64", MIDDLE),
        ("trace:24", WIDE),
    ),
}
"""Pairs of a workload and a plan that were named, by the type of model, before any of them had run."""


def workload_of(text: str, trace: Path | None, context: int) -> Workload:
    """Return a workload as `sgl-batch plan` takes it, or one of two others.

    tail:COUNT has outputs with a long tail; trace:COUNT takes the first requests of a trace that fit into `context`
    tokens.
    """
    kind, _, count = text.partition(":")
    if kind == "trace":
        if trace is None:
            raise ConfigError(f"the workload {text} needs --trace FILE, a CSV file of a public trace")
        every = (Request(prompt, output) for prompt, output in trace_lengths(trace))
        requests = list(islice((one for one in every if one.prompt + one.output <= context), int(count)))
    elif kind == "tail":
        draw = random.Random(3)
        requests = [
            Request(draw.randint(32, 256), min(8 + int(draw.paretovariate(1.2) * 8), 384)) for _ in range(int(count))
        ]
    else:
        return parse_workload(text)
    return Workload(requests=requests, count=len(requests))


def predictor(model: Path, file: Path | None) -> Callable[[Candidate, Workload], Prediction]:
    """Return the planner's prediction with the profile that is kept, fitted once."""
    profile, layers = kept_profile(model, file)
    costs, allowed = fit(profile, layers), Allowed(cores=int(profile.machine["cores"]))

    def predict(candidate: Candidate, workload: Workload) -> Prediction:
        found = predict_candidate(candidate, workload, costs, layers, allowed, _ROOM)
        if found is None:
            raise ConfigError("a sequence of the workload can never fit")
        return found

    return predict


def run(args: argparse.Namespace, candidate: Candidate, workload: Workload) -> dict[str, Any]:
    """Run the batch; return the manifest's numbers: seconds, seconds by part, and the lines that failed."""
    draw = random.Random(1)
    with tempfile.TemporaryDirectory() as directory:
        source, output = Path(directory, "in.jsonl"), Path(directory, "out.jsonl")
        with source.open("w", encoding="utf-8") as lines:
            for number, request in enumerate(workload.requests):
                prompt = [draw.randrange(10, 2000) for _ in range(request.prompt)]
                body = {"model": "m", "prompt": prompt, "max_tokens": request.output, "temperature": 0}
                line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions"}
                lines.write(json.dumps({**line, "body": {**body, "ignore_eos": True}}) + "\n")
        command = [sys.executable, "-m", "sgl_batch.cli", "run", "-i", str(source), "-o", str(output), "--model"]
        command += [str(args.model), "--served-model-name", "m", *flags_of(candidate.settings), *args.run_flag]
        # Without the kept profile a run plans nothing by itself, such as --accumulate, which these plans leave alone.
        environment = {**os.environ, "XDG_CACHE_HOME": directory}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        manifest = output.with_name("out.manifest.json")
        if done.returncode or not manifest.exists():
            raise ConfigError(f"sgl-batch run ended with {done.returncode}: {done.stderr[-400:]}")
        found: dict[str, Any] = json.loads(manifest.read_text(encoding="utf-8"))
        return found


def measure(
    args: argparse.Namespace, predict: Callable[[Candidate, Workload], Prediction], text: str, limits: Limits
) -> float | None:
    """Predict and run one workload with one plan, and print its row. Returns the relative error of the prediction."""
    workload = workload_of(text, args.trace, model_config(args.model)["max_position_embeddings"])
    names = ("b_attn_prefill", "b_moe_prefill", "b_attn_decode", "b_moe_decode")
    candidate = Candidate(**dict(zip(names, limits, strict=True)))
    prediction = predict(candidate, workload)
    said = {name: round(seconds, 2) for name, seconds in prediction.parts.items()}
    say(f"{text} {limits}: predicted {prediction.seconds:.2f} s {said}")
    if args.predict_only:
        return None
    walls = []
    for _ in range(args.repeat):
        manifest = run(args, candidate, workload)
        walls.append(float(manifest["wall_s"]))
        say(f"measured {walls[-1]:.2f} s {(manifest['engine'] or {}).get('part_s')}")
    found = spread(walls)
    assert found is not None, "it has run"
    error = prediction.seconds / found.median - 1
    plan = f"{limits[0]}/{limits[1]}, {limits[2]}/{limits[3]}"
    load = os.getloadavg()[0]
    print(f"| {text} | {plan} | {prediction.seconds:.1f} s | {found.text(1)} s | {error:+.0%} | {load:.1f} |")
    return error


def main(argv: Sequence[str]) -> int:
    """Run all workloads with all plans, and print a table in Markdown as it comes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the model's directory")
    parser.add_argument("--profile-file", type=Path, help="(the one in the user's cache)")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help=f"({','.join(WORKLOADS)})")
    parser.add_argument("--plans", type=int, default=len(PLANS), help="how many of the plans (all)")
    parser.add_argument("--run-flag", action="append", default=[], help="a flag of `sgl-batch run`; repeatable")
    parser.add_argument("--predict-only", action="store_true", help="run nothing")
    parser.add_argument("--declared", action="store_true", help="run the pairs that are declared for the model's type")
    parser.add_argument("--trace", type=Path, help="the Azure trace of LLM inference, for workloads trace:COUNT")
    parser.add_argument("--repeat", type=int, default=1, help="how often each runs; the median counts (1)")
    args = parser.parse_args(argv)
    predict = predictor(args.model, args.profile_file)
    pairs = [(text, limits) for text in args.workloads.split(",") for limits in PLANS[: args.plans]]
    if args.declared:
        pairs = list(DECLARED[model_config(args.model)["model_type"]])
    print("| workload | plan (sub-batch/group of prefill, of decode) | predicted | measured | error | load |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    errors = []
    for text, limits in pairs:
        error = measure(args, predict, text, limits)
        errors += [] if error is None else [abs(error)]
        sys.stdout.flush()
    if errors:
        print(f"\nErrors without sign: median {statistics.median(errors):.0%}, largest {max(errors):.0%}.")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("plan_runs.py", lambda: main(sys.argv[1:])))
