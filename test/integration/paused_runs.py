"""Owns requests to a running engine that a test pauses in the middle, and sending it new weights."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.utils import MultiprocessingSerializer

LONG = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}


def ask(engine: Any, input_ids: list[list[int]], parameters: dict[str, Any] = LONG) -> list[list[int]]:
    return [answer["output_ids"] for answer in engine.generate(input_ids=input_ids, sampling_params=parameters)]


def counters(engine: Any) -> dict[str, int]:
    return engine.batch_stats()["counters"]


async def states(engine: Any) -> list[dict[str, Any]]:
    return [state["sgl_batch"] for state in await engine.tokenizer_manager.get_internal_state()]


def run_paused(
    engine: Any, requests: list[dict[str, Any]], mode: str, meanwhile: Callable[[], Awaitable[None]] | None = None
) -> list[Any]:
    """Return the answers to requests that are paused after some decode steps; the last one is sent during the pause."""
    manager = engine.tokenizer_manager

    async def scenario() -> list[Any]:
        try:
            return await pausing(await paused_in_the_middle())
        except BaseException:  # the next test uses the engine, too
            manager.abort_request(abort_all=True)
            await manager.continue_generation(ContinueGenerationReqInput())
            raise

    async def paused_in_the_middle() -> list[asyncio.Future[Any]]:
        # On a busy machine all requests may finish between two looks at the number of steps, and run again.
        for steps_before in (20, 10, 5, 5, 5):
            tasks = await paused_after(steps_before)
            if not any(task.done() for task in tasks):
                return tasks
            await manager.continue_generation(ContinueGenerationReqInput())
            await asyncio.gather(*tasks)
        raise AssertionError("five times the requests finished before the pause")

    async def paused_after(steps: int) -> list[asyncio.Future[Any]]:
        start = (await states(engine))[0]["counters"].get("decode_steps", 0)
        tasks = [asyncio.ensure_future(engine.async_generate(**request)) for request in requests[:-1]]
        while (await states(engine))[0]["counters"].get("decode_steps", 0) < start + steps:
            await asyncio.sleep(0.002)
        await manager.pause_generation(PauseGenerationReqInput(mode=mode))
        return tasks

    async def pausing(tasks: list[asyncio.Future[Any]]) -> list[Any]:
        tasks.append(asyncio.ensure_future(engine.async_generate(**requests[-1])))
        before = [state["counters"].get("expert_calls", 0) for state in await states(engine)]
        if meanwhile is not None:
            await meanwhile()
        after = await states(engine)
        assert [state["counters"].get("expert_calls", 0) for state in after] == before, "no forward pass"
        if mode == "retract":
            assert all(set(state["sequences"]) <= {"QUEUED"} for state in after)
            assert all(state["free_pages"] == state["total_pages"] for state in after)
        await manager.continue_generation(ContinueGenerationReqInput())
        return list(await asyncio.gather(*tasks))

    try:
        return engine.loop.run_until_complete(asyncio.wait_for(scenario(), 120))
    finally:
        stats = engine.batch_stats()
        assert stats["free_pages"] == stats["total_pages"]
        assert stats["counters"].get("recomputed_tokens_unplanned", 0) == 0


def tensors_for(engine: Any, weights: dict[str, torch.Tensor]) -> Any:
    ranks = engine.server_args.dp_size
    return UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=[MultiprocessingSerializer.serialize(list(weights.items())) for _ in range(ranks)],
        flush_cache=False,
    )


async def load_from(engine: Any, path: Path | str) -> None:
    """Make the engine load the weights of another checkpoint."""
    request = UpdateWeightFromDiskReqInput(model_path=str(path))
    done, message, _ = await engine.tokenizer_manager.update_weights_from_disk(request)
    assert done, message


def trained_copy(source: str | Path, target: Path) -> Path:
    """Return a copy of a checkpoint with other weights."""
    shutil.copytree(source, target)
    noise = torch.Generator().manual_seed(1)
    for file in target.glob("*.safetensors"):
        weights = {
            name: weight * (1 + 0.3 * torch.randn(weight.shape, generator=noise)).to(weight.dtype)
            for name, weight in load_file(file).items()
        }
        save_file(weights, file, metadata={"format": "pt"})
    return target
