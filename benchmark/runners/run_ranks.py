"""Owns one run of sgl_batch over a workload for ranks: start, warm up, time, read the counters of each rank.

Called as `PYTHON run_ranks.py SPEC RESULT`, by ranks.py. SPEC has the model, the engine's options, the cores of a
single rank (null for several), prompts and output_lens; it may have:

  longest_alone  false: the longest sequence is not run alone
  sample_s       seconds from sample to sample of the ranks (0.5)
  ready, gate    files: the first is made after the warm-up, and the workload begins when there is the second
"""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

_SAMPLE_S = 0.5
_GATE_S = 0.005
_WARM_UP_PROMPTS = 4
_WARM_UP_TOKENS = 256
_WARM_UP_OUTPUT = 4
_DIGEST_DIGITS = 12


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Run what `spec` describes; a single rank runs on the cores that it names."""
    if spec["cores"] is not None:
        os.sched_setaffinity(0, spec["cores"])
    from sgl_batch.sglang_adapter.child_processes import FORK, SPAWN, template

    # The modules of all engine processes are imported once, here.
    with template(spec["engine"].get("device")) as can_fork:
        from sgl_batch import Engine
    method = FORK if can_fork else SPAWN
    engine = Engine(model_path=spec["model"], log_level="error", start_method=method, **spec["engine"])
    atexit.register(engine.shutdown)  # after the result is written: a stop that hangs costs no finished measurement
    return {**engine.loop.run_until_complete(_run(engine, spec)), **_cores_of_ranks()}


async def _run(engine: Any, spec: dict[str, Any]) -> dict[str, Any]:
    """Run a warm-up, the workload, and its longest sequence alone."""
    prompts, output_lens, sample_s = spec["prompts"], spec["output_lens"], spec.get("sample_s", _SAMPLE_S)
    answers, warm_up = engine.line_engine(), [prompt[:_WARM_UP_TOKENS] for prompt in prompts[:_WARM_UP_PROMPTS]]
    await _timed(engine, answers, warm_up, [_WARM_UP_OUTPUT] * len(warm_up), sample_s)
    if "gate" in spec:
        await _pass_gate(Path(spec["ready"]), Path(spec["gate"]))
    whole = await _timed(engine, answers, prompts, output_lens, sample_s)
    if not spec.get("longest_alone", True):
        return whole
    longest = max(range(len(prompts)), key=lambda number: output_lens[number])
    alone = await _timed(engine, answers, [prompts[longest]], [output_lens[longest]], sample_s)
    return {**whole, "longest_alone_s": alone["seconds"]}


async def _pass_gate(ready: Path, gate: Path) -> None:
    ready.touch()
    while not gate.exists():
        await asyncio.sleep(_GATE_S)


async def _generate(engine: Any, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
    sampling = [{"temperature": 0, "max_new_tokens": count, "ignore_eos": True} for count in output_lens]
    answers = await engine.async_generate(input_ids=prompts, sampling_params=sampling)
    return [answer["output_ids"] for answer in answers]


async def _timed(
    engine: Any, answers: Any, prompts: list[list[int]], output_lens: list[int], sample_s: float
) -> dict[str, Any]:
    """Run one workload; return its seconds, counters by rank, active sequences and waiting over time, and digests."""
    before, over = await answers.stats(), asyncio.Event()
    active: list[Any] = []
    waiting: list[Any] = []
    begun = time.perf_counter()
    async with asyncio.TaskGroup() as group:  # reading the counters of a dead engine fails, and ends the group
        group.create_task(_watch(answers, before, begun, over, sample_s, active, waiting))
        outputs = await _generate(engine, prompts, output_lens)
        seconds = time.perf_counter() - begun
        over.set()
    lengths = [len(output) for output in outputs]
    if lengths != output_lens:
        raise RuntimeError(f"outputs have {lengths} tokens, not {output_lens}")
    return {
        "seconds": seconds,
        "ranks": [dataclasses.asdict(rank) for rank in _ranks((await answers.stats()).since(before))],
        "active": active,
        "waiting": waiting,
        "outputs": _digest(outputs),
        "by_sequence": [_digest(output)[:_DIGEST_DIGITS] for output in outputs],
    }


def _digest(tokens: Any) -> str:
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def _ranks(stats: Any) -> list[Any]:
    return list(stats.ranks) or [stats]


async def _watch(
    answers: Any,
    last: Any,
    begun: float,
    over: asyncio.Event,
    sample_s: float,
    active: list[Any],
    waiting: list[Any],
) -> None:
    """Sample each rank until the workload ends: sequences that it decodes, and its share of waits, since the last."""
    while not over.is_set():
        try:
            await asyncio.wait_for(over.wait(), sample_s)
        except TimeoutError:
            stats = await answers.stats()
            ranks = _ranks(stats.since(last))
            last, now = stats, time.perf_counter() - begun
            counted = [rank.counters for rank in ranks]
            active.append((now, [one.get("decode_rows", 0) / max(one.get("decode_steps", 0), 1) for one in counted]))
            waiting.append((now, [rank.waiting_share for rank in ranks]))


def _cores_of_ranks() -> dict[str, list[list[int]]]:
    """Return the cores of each scheduler process, by rank."""
    import psutil

    below = psutil.Process().children(recursive=True)
    ranks = [process for process in below if "scheduler" in " ".join(process.cmdline())]
    ordered = sorted(ranks, key=lambda process: " ".join(process.cmdline()))
    return {"cores": [process.cpu_affinity() for process in ordered]}


if __name__ == "__main__":  # the engine's child processes import this file again
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from runners.result_file import answer

    answer(measure)
