"""Pauses, aborts and new weights change answers as asked and no others: on one rank and two, with a store and none."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
from sglang.srt.utils import init_custom_process_group

from sgl_batch import Engine

from .conftest import FAMILIES, EngineShelf, Prompts

pytestmark = pytest.mark.engine

PAGE = 16
SMALL = {"dtype": "float32", "page_size": PAGE, "b_moe_prefill": 700, "b_moe_decode": 8, "boundary_tokens": 8}
RANKS = {"tp_size": 2, "dp_size": 2, "ep_size": 2, "enable_dp_attention": True}
# A device for 60 pages; the prompts below and their outputs take 130.
STORE = {"max_total_tokens": 60 * PAGE, "kv_store_bytes": 64 << 20}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"max_total_tokens": 16384},
    "streamed": {**STORE, "decode_kv": "streamed"},
    "exclusive": {**STORE, "kv_store_mode": "exclusive", "decode_kv": "resident"},
    "two-ranks-store": {**STORE, "decode_kv": "resident", **RANKS},
}
LONG = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
SAMPLED = {**LONG, "temperature": 0.8, "sampling_seed": 7, "n": 3, "frequency_penalty": 0.3}


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest, model_path: Callable[[str], str]) -> Iterator[Any]:
    engine = Engine(model_path=model_path(FAMILIES[0]), **SMALL, **KINDS[request.param])
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model_path: Callable[[str], str]) -> Path:
    """The same model with other weights."""
    target = tmp_path_factory.mktemp("trained") / "model"
    shutil.copytree(model_path(FAMILIES[0]), target)
    noise = torch.Generator().manual_seed(1)
    for file in target.glob("*.safetensors"):
        weights = {
            name: weight * (1 + 0.3 * torch.randn(weight.shape, generator=noise)).to(weight.dtype)
            for name, weight in load_file(file).items()
        }
        save_file(weights, file, metadata={"format": "pt"})
    return target


@pytest.fixture(scope="module")
def of_trained(shelf: EngineShelf, trained: Path) -> Callable[[list[list[int]], list[int]], list[list[int]]]:
    """What an engine that was started with the other weights answers to prompts, with so many tokens each."""

    def ask(input_ids: list[list[int]], lengths: list[int]) -> list[list[int]]:
        engine = shelf.get(Engine, model_path=str(trained), max_total_tokens=16384, **SMALL)
        parameters = [{**LONG, "max_new_tokens": length} for length in lengths]
        return [answer["output_ids"] for answer in engine.generate(input_ids=input_ids, sampling_params=parameters)]

    return ask


def ask(engine: Any, input_ids: list[list[int]], parameters: dict[str, Any] = LONG) -> list[list[int]]:
    return [answer["output_ids"] for answer in engine.generate(input_ids=input_ids, sampling_params=parameters)]


def counters(engine: Any) -> dict[str, int]:
    return engine.batch_stats()["counters"]


async def states(engine: Any) -> list[dict[str, Any]]:
    return [state["sgl_batch"] for state in await engine.tokenizer_manager.get_internal_state()]


def run_paused(
    engine: Any, requests: list[dict[str, Any]], mode: str, meanwhile: Callable[[], Awaitable[None]] | None = None
) -> list[Any]:
    """Answers to requests that are paused when each that runs has some tokens; the last one comes during the pause."""
    manager = engine.tokenizer_manager

    async def scenario() -> list[Any]:
        steps = (await states(engine))[0]["counters"]["decode_steps"]
        tasks = [asyncio.ensure_future(engine.async_generate(**request)) for request in requests[:-1]]
        while (await states(engine))[0]["counters"]["decode_steps"] < steps + 20:
            await asyncio.sleep(0.002)
        await manager.pause_generation(PauseGenerationReqInput(mode=mode))
        assert not any(task.done() for task in tasks), "paused in the middle"
        tasks.append(asyncio.ensure_future(engine.async_generate(**requests[-1])))
        before = [state["counters"]["expert_calls"] for state in await states(engine)]
        if meanwhile is not None:
            await meanwhile()
        after = await states(engine)
        assert [state["counters"]["expert_calls"] for state in after] == before, "no forward pass"
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
        assert stats["counters"]["recomputed_tokens_unplanned"] == 0


@pytest.fixture
def inputs(prompts: Prompts) -> list[list[int]]:
    return prompts.input_ids[2:11]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_changes_no_answer(mode: str, engine: Any, inputs: list[list[int]]) -> None:
    sampled = {**SAMPLED, "max_new_tokens": 40}
    whole = [*([ids] for ids in ask(engine, inputs)), ask(engine, [inputs[5]], sampled)]
    planned, retractions = (counters(engine).get(name, 0) for name in ("recomputed_tokens_planned", "retractions"))
    requests = [{"input_ids": [ids], "sampling_params": LONG} for ids in inputs[1:]]
    requests = [{"input_ids": [inputs[5]], "sampling_params": sampled}, *requests]
    requests.append({"input_ids": [inputs[0]], "sampling_params": LONG})
    answers = [[choice["output_ids"] for choice in answer] for answer in run_paused(engine, requests, mode)]
    assert answers == [whole[-1], *whole[1:-1], whole[0]]
    after = counters(engine)
    assert (after.get("retractions", 0) > retractions) == (mode == "retract")
    if mode == "retract":
        assert after["recomputed_tokens_planned"] - planned > 200


def test_retracted_sequences_go_on_with_new_weights(
    engine: Any, inputs: list[list[int]], trained: Path, of_trained: Any, model_path: Callable[[str], str]
) -> None:
    manager = engine.tokenizer_manager
    old = ask(engine, inputs)

    async def update() -> None:
        await load(trained)

    async def load(path: Path | str) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        done, message, _ = await manager.update_weights_from_disk(UpdateWeightFromDiskReqInput(model_path=str(path)))
        assert done, message

    requests = [{"input_ids": ids, "sampling_params": LONG} for ids in inputs]
    answers = [answer["output_ids"] for answer in run_paused(engine, requests, "retract", update)]
    # As long as both weights say the same, nobody can tell which of them spoke.
    same = [
        next((n for n, (a, b) in enumerate(zip(now, before, strict=True)) if a != b), len(now))
        for now, before in zip(answers, old, strict=True)
    ]
    assert sum(0 < number < 60 for number in same[:-1]) > 3, "some began with the old weights and ended with the new"
    left = [number for number, length in enumerate(same) if length < 60]
    begun = [inputs[n] + answers[n][: same[n]] for n in left]
    assert of_trained(begun, [60 - same[n] for n in left]) == [answers[n][same[n] :] for n in left]
    assert ask(engine, inputs) == of_trained(inputs, [60] * len(inputs))
    engine.loop.run_until_complete(load(model_path(FAMILIES[0])))
    assert ask(engine, inputs) == old


def test_an_update_without_a_flush_keeps_the_kv_of_who_runs_and_no_new_prompt_finds_it(
    engine: Any, inputs: list[list[int]], trained: Path, of_trained: Any, model_path: Callable[[str], str]
) -> None:
    weights, plain = load_file(trained / "model.safetensors"), load_file(f"{model_path(FAMILIES[0])}/model.safetensors")
    retractions = counters(engine).get("retractions", 0)
    late = {"input_ids": inputs[8], "sampling_params": LONG}  # as the last of those that run
    requests = [*({"input_ids": ids, "sampling_params": LONG} for ids in inputs), late]

    async def update() -> None:
        payload = tensors_for(engine, weights)
        done, message = await engine.tokenizer_manager.update_weights_from_tensor(payload)
        assert done, message

    answers = run_paused(engine, requests, "in_place", update)
    assert [len(answer["output_ids"]) for answer in answers] == [60] * len(requests)
    assert answers[-1]["output_ids"] == of_trained([inputs[8]], [60])[0]
    assert counters(engine).get("retractions", 0) == retractions
    done, message = engine.update_weights_from_tensor(list(plain.items()))
    assert done, message


def tensors_for(engine: Any, weights: dict[str, torch.Tensor]) -> Any:
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
    from sglang.srt.utils import MultiprocessingSerializer

    ranks = engine.server_args.dp_size
    return UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=[MultiprocessingSerializer.serialize(list(weights.items())) for _ in range(ranks)],
        flush_cache=False,
    )


def test_a_trainer_broadcasts_new_weights_to_all_ranks(
    engine: Any, inputs: list[list[int]], trained: Path, of_trained: Any, model_path: Callable[[str], str]
) -> None:
    ranks = engine.server_args.dp_size
    weights, plain = load_file(trained / "model.safetensors"), load_file(f"{model_path(FAMILIES[0])}/model.safetensors")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    name = f"trainer-{port}"

    def train() -> None:
        group = init_custom_process_group(
            backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=1 + ranks, rank=0, group_name=name
        )
        for some in (weights, plain):
            for weight in some.values():
                torch.distributed.broadcast(weight, src=0, group=group)

    trainer = threading.Thread(target=train, daemon=True)
    trainer.start()
    done, message = engine.init_weights_update_group("127.0.0.1", port, 1, 1 + ranks, name, backend="gloo")
    assert done, message
    names, shapes = list(weights), [list(weight.shape) for weight in weights.values()]
    dtypes = [str(weight.dtype).removeprefix("torch.") for weight in weights.values()]
    old = ask(engine, inputs[:4])
    done, message = engine.update_weights_from_distributed(names, dtypes, shapes, group_name=name)
    assert done, message
    assert ask(engine, inputs[:4]) == of_trained(inputs[:4], [60] * 4)
    done, message = engine.update_weights_from_distributed(names, dtypes, shapes, group_name=name)
    assert done, message
    trainer.join(10)
    assert ask(engine, inputs[:4]) == old


def test_who_is_aborted_during_a_pause_has_what_it_had_generated(engine: Any, inputs: list[list[int]]) -> None:
    whole = ask(engine, inputs)
    manager = engine.tokenizer_manager

    async def abort() -> None:
        manager.abort_request(abort_all=True)

    requests = [{"input_ids": ids, "sampling_params": LONG} for ids in [*inputs, inputs[0]]]
    answers = run_paused(engine, requests, "retract", abort)
    reasons = [answer["meta_info"]["finish_reason"]["type"] for answer in answers]
    assert reasons[:-1] == ["abort"] * len(inputs)
    had = [answer["output_ids"] for answer in answers[:-1]]
    assert any(had)
    assert had == [tokens[: len(some)] for tokens, some in zip(whole, had, strict=True)]


def test_what_cannot_be_loaded_is_said_and_the_engine_goes_on(engine: Any, inputs: list[list[int]]) -> None:
    old = ask(engine, inputs[:2])
    done, message = engine.update_weights_from_tensor([("no.such.weight", torch.ones(3))], load_format="direct")
    assert not done
    assert "no.such.weight" in message
    with pytest.raises(ValueError, match="memory saver is for GPUs"):
        engine.release_memory_occupation()
    assert engine.flush_cache().success
    assert ask(engine, inputs[:2]) == old
    assert json.dumps(engine.get_weights_by_name("model.norm.weight"))
