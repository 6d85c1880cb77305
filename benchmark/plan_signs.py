#!/usr/bin/env python
"""Measures whether the planner says rightly which of two plans is faster, for choices that differ in mechanism.

Each pair differs in one thing: whether sub-batches share an expert call, the length of an interval, where KV lies, how
weights are kept under a limit of memory. Both plans of a pair run the same batch by turns, each in a new engine.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comparison.figures import Spread, paired_ratios, spread
from comparison.kept_profile import kept_profile
from comparison.report import table
from comparison.terminal import exit_code, say
from comparison.timed_batch import batch_seconds
from comparison.workload import model_config

from sgl_batch.config import BatchConfig, split_kwargs
from sgl_batch.core.supported_models import CPU
from sgl_batch.errors import ConfigError
from sgl_batch.planner.candidate import DEVICE, INCLUSIVE, RESIDENT, STREAMED, Candidate
from sgl_batch.planner.candidate_memory import CandidateMemory
from sgl_batch.planner.candidates import Allowed
from sgl_batch.planner.cost_model import fit
from sgl_batch.planner.followed_run import Room
from sgl_batch.planner.needs import Target
from sgl_batch.planner.schedule import Prediction
from sgl_batch.planner.search import MemoryMap, predict_candidate
from sgl_batch.planner.workload import Request, Workload, parse_workload
from sgl_batch.startup.planned_model import read_model

_PAGE_SIZE = 64
_WIDE = {"b_attn_prefill": 2048, "b_moe_prefill": 8192, "b_attn_decode": 256, "b_moe_decode": 256}
_SMALL_SUB_BATCHES = {**_WIDE, "b_attn_prefill": 64, "b_moe_prefill": 2048, "b_attn_decode": 8, "b_moe_decode": 64}
_FEW = {**_WIDE, "b_attn_decode": 16, "b_moe_decode": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One plan of a pair: arguments of the engine, and where it keeps KV as the planner names it."""

    name: str
    arguments: Mapping[str, Any]
    kv: str = DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two plans for one batch. `common`: arguments of both engines."""

    name: str
    workload: Workload
    sides: tuple[Side, Side]
    common: Mapping[str, Any] = field(default_factory=dict)


def unequal(count: int) -> Workload:
    """Return requests of which a few have long outputs."""
    draw = random.Random(3)
    requests = [Request(32, 6 if draw.random() < 0.8 else 100) for _ in range(count)]
    return Workload(requests=requests, count=count)


def pairs() -> list[Pair]:
    """Return all pairs."""
    pool, store = {"max_total_tokens": 1 << 16}, {"kv_store_bytes": 2 << 30, "kv_store_mode": "inclusive"}
    few_pages = {"max_total_tokens": 24 * _PAGE_SIZE}
    limit = {"device_memory": 2700 << 20, **_WIDE, "b_moe_prefill": 2048}
    return [
        Pair(
            name="expert calls of small sub-batches",
            workload=parse_workload("64:24x64"),
            common={**pool, **_SMALL_SUB_BATCHES},
            sides=(
                Side(name="shared", arguments={"accumulate": True}),
                Side(name="apart", arguments={"accumulate": False}),
            ),
        ),
        Pair(
            name="interval, with unequal outputs",
            workload=unequal(96),
            common={**pool, **_FEW},
            sides=(
                Side(name="8 steps", arguments={"boundary_tokens": 8}),
                Side(name="96 steps", arguments={"boundary_tokens": 96}),
            ),
        ),
        Pair(
            name="KV with a store and few device pages",
            workload=parse_workload("128:48x64"),
            common={**few_pages, **store, **_WIDE},
            sides=(
                Side(name="streamed", arguments={"decode_kv": "streamed"}, kv=STREAMED),
                Side(name="resident", arguments={"decode_kv": "resident"}, kv=INCLUSIVE),
            ),
        ),
        Pair(
            name="weights under a limit of memory",
            workload=parse_workload("128:32x48"),
            common=limit,
            sides=(
                Side(name="resident, 8 sequences", arguments={"b_attn_decode": 8, "b_moe_decode": 8}),
                Side(
                    name="streamed, 48 sequences",
                    arguments={"b_attn_decode": 48, "b_moe_decode": 48, "weights": "streamed"},
                ),
            ),
        ),
    ]


class Predictor:
    """Predicts both plans of a pair with the profile that is kept."""

    def __init__(self, model: Path, file: Path | None) -> None:
        self._profile, self._layers = kept_profile(model, file)
        self._costs = fit(self._profile, self._layers)
        self._model = read_model(str(model), dtype="auto", weight_dtype="auto")

    def predict(self, pair: Pair, side: Side) -> Prediction:
        """Return the prediction of a plan. Raises ConfigError where it does not fit, or a rate was not measured."""
        arguments = {**pair.common, **side.arguments}
        config, others = split_kwargs(arguments)
        weights = config.memory.weights
        if weights == STREAMED and "disk" not in self._profile.rates:
            raise ConfigError("the profile has no rate of reading the checkpoint: make it with --weights streamed")
        candidate = Candidate(
            **{name: arguments[name] for name in _WIDE},
            accumulate=arguments.get("accumulate"),
            kv=side.kv,
            weights=RESIDENT if weights == RESIDENT else STREAMED,
        )
        allowed = Allowed(cores=int(self._profile.machine["cores"]), base=config)
        memory = self._memory(candidate, config, others.get("max_total_tokens"), pair.workload)
        found = predict_candidate(candidate, pair.workload, self._costs, self._layers, allowed, memory)
        if found is None:
            raise ConfigError(f"{pair.name}, {side.name}: a sequence can never fit")
        return found

    def _memory(self, candidate: Candidate, config: BatchConfig, pool: int | None, workload: Workload) -> MemoryMap:
        if pool is None:
            target = Target(
                device=CPU, budget=config.memory.device_memory, page_size=_PAGE_SIZE, length=workload.longest
            )
            return CandidateMemory(model=self._model.files, target=target, base=config)(candidate)
        page_bytes = int(_PAGE_SIZE * self._layers.kv_layer_bytes * self._layers.num_layers)
        store = config.memory.kv_store_bytes // page_bytes
        return MemoryMap(phases={}, room=Room(device=pool // _PAGE_SIZE, store=store))


def run(model: Path, pair: Pair, side: Side) -> float:
    """Return the seconds of the batch, in a new engine that has answered two short prompts."""
    from sgl_batch import Engine

    engine = Engine(model_path=str(model), log_level="error", **{**pair.common, **side.arguments})
    try:
        engine.generate(input_ids=[[9] * 8, [8] * 9], sampling_params={"max_new_tokens": 4, "temperature": 0})
        return batch_seconds(engine, pair.workload, random.Random(7), int(model_config(model)["vocab_size"]))
    finally:
        engine.shutdown()


def row(pair: Pair, predicted: Sequence[Prediction], walls: Sequence[Mapping[int, float]]) -> list[str]:
    """Return a pair's row of the table."""
    ratio = paired_ratios(walls[1], walls[0])
    assert ratio is not None, "both have run"
    expected = predicted[1].seconds / predicted[0].seconds
    seconds = [_spread(of) for of in walls]
    return [
        pair.name,
        f"{pair.sides[0].name}: {predicted[0].seconds:.1f}, {seconds[0].text(1)}",
        f"{pair.sides[1].name}: {predicted[1].seconds:.1f}, {seconds[1].text(1)}",
        f"{expected:.2f}",
        ratio.text(2),
        "right" if (expected > 1) == (ratio.median > 1) else "WRONG",
    ]


def _spread(walls: Mapping[int, float]) -> Spread:
    found = spread(walls.values())
    assert found is not None, "it has run"
    return found


def main(argv: Sequence[str]) -> int:
    """Predict and run all pairs; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the model's directory")
    parser.add_argument("--profile-file", type=Path, help="(the one in the user's cache)")
    parser.add_argument("--rounds", type=int, default=3, help="(3)")
    parser.add_argument("--only", default="", metavar="TEXT", help="pairs whose name has it (all)")
    parser.add_argument("--predict-only", action="store_true", help="run nothing")
    args = parser.parse_args(argv)
    predictor, rows = Predictor(args.model, args.profile_file), []
    for pair in (one for one in pairs() if args.only in one.name):
        predicted = [predictor.predict(pair, side) for side in pair.sides]
        say(f"{pair.name}: predicted {', '.join(f'{one.seconds:.2f} s' for one in predicted)}")
        if args.predict_only:
            continue
        walls: tuple[dict[int, float], dict[int, float]] = ({}, {})
        for number in range(args.rounds):
            for index in (0, 1) if number % 2 == 0 else (1, 0):
                walls[index][number] = run(args.model, pair, pair.sides[index])
                say(f"round {number + 1}/{args.rounds}, {pair.sides[index].name}: {walls[index][number]:.2f} s")
        rows.append(row(pair, predicted, walls))
    if rows:
        first, second = "first: predicted, measured s", "second: predicted, measured s"
        print(table(["choice", first, second, "second/first predicted", "measured", "sign"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("plan_signs.py", lambda: main(sys.argv[1:])))
