"""Pauses, aborts, new plans and weights change only the answers they should: on one rank and two, also with a store."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sglang.srt.utils import init_custom_process_group

from sgl_batch import Engine
from sgl_batch.core.replay import replay_trace

from .conftest import FAMILIES, EngineCache, Prompts
from .paused_runs import LONG, ask, counters, load_from, run_paused, states, tensors_for, trained_copy
from .whole_sequences import WholeSequences

pytestmark = pytest.mark.engine

PAGE = 16
SIZES = {"b_moe_prefill": 700, "b_moe_decode": 8, "boundary_tokens": 8}
SMALL = {"dtype": "float32", "page_size": PAGE, **SIZES}
ROUTING = {"enable_return_routed_experts": True}
RANKS = {"tp_size": 2, "dp_size": 2, "ep_size": 2, "enable_dp_attention": True}
# A device for 60 pages; the prompts below and their outputs take 130.
STORE = {"max_total_tokens": 60 * PAGE, "kv_store_bytes": 64 << 20}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"max_total_tokens": 16384},
    "two-ranks-store": {**STORE, "decode_kv": "resident", **RANKS},
    "streamed": {**STORE, "decode_kv": "streamed"},
    "exclusive": {**STORE, "kv_store_mode": "exclusive", "decode_kv": "resident"},
}
SAMPLED = {**LONG, "temperature": 0.8, "sampling_seed": 7, "n": 3, "frequency_penalty": 0.3}


# The mode of a pause for tests that run each kind in one; test_a_pause_changes_no_answer runs each in both.
MODES = {"plain": "retract", "two-ranks-store": "in_place", "streamed": "in_place", "exclusive": "retract"}
# Weights do not depend on KV: one rank with all weights, and several with a part each. They are the first two of KINDS,
# because pytest orders tests by the index of their parameter and so keeps an engine for the next test.
by_ranks = pytest.mark.parametrize("kind", ["plain", "two-ranks-store"], indirect=True)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def trace_file(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("control") / f"{kind}.jsonl"


@pytest.fixture(scope="module")
def engine(kind: str, trace_file: Path, model_path: Callable[[str], str]) -> Iterator[Any]:
    settings = {**SMALL, **ROUTING, **KINDS[kind], "trace_file": str(trace_file)}
    engine = Engine(model_path=model_path(FAMILIES[0]), **settings)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model_path: Callable[[str], str]) -> Path:
    """Return the same model with other weights."""
    return trained_copy(model_path(FAMILIES[0]), tmp_path_factory.mktemp("trained") / "model")


@pytest.fixture(scope="module")
def answers_of_trained(
    engine_cache: EngineCache, trained: Path
) -> Callable[[list[list[int]], list[int]], list[list[int]]]:
    """Return a function that gives the answers, of given lengths, of an engine started with the other weights."""

    def ask(input_ids: list[list[int]], lengths: list[int]) -> list[list[int]]:
        engine = engine_cache.get(Engine, model_path=str(trained), max_total_tokens=16384, **SMALL)
        parameters = [{**LONG, "max_new_tokens": length} for length in lengths]
        return [answer["output_ids"] for answer in engine.generate(input_ids=input_ids, sampling_params=parameters)]

    return ask


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


@by_ranks
def test_a_plan_refined_in_the_middle_changes_no_answer_and_replays(
    engine: Any, inputs: list[list[int]], trace_file: Path
) -> None:
    whole, before = ask(engine, inputs), counters(engine)

    async def refined() -> list[Any]:
        tasks = [asyncio.ensure_future(engine.async_generate(input_ids=ids, sampling_params=LONG)) for ids in inputs]
        while (await states(engine))[0]["counters"]["decode_steps"] < before["decode_steps"] + 3:
            await asyncio.sleep(0.002)
        smaller = {
            "b_moe_decode": 3,
            "b_attn_decode": 2,
            "b_attn_prefill": 64,
            "boundary_tokens": 5,
            "accumulate": False,
        }
        await engine.refine_plan(smaller, "a test")
        return list(await asyncio.gather(*tasks))

    try:
        assert [answer["output_ids"] for answer in engine.loop.run_until_complete(refined())] == whole
        stats, ranks = engine.batch_stats(), engine.server_args.dp_size
        assert (stats["plan"]["decode"]["b_moe"], stats["plan"]["boundary_tokens"]) == (3, 5)
        assert stats["counters"]["plan_refinements"] - before.get("plan_refinements", 0) == ranks
    finally:
        engine.set_plan(**{**SIZES, "b_attn_decode": 0, "b_attn_prefill": 2048, "accumulate": None})
    events = [json.loads(line) for line in trace_file.read_text().splitlines()]
    assert [one["why"] for one in events if one.get("decision") == "plan"][:ranks] == ["a test"] * ranks
    number, differences = replay_trace(events)
    assert number > 0
    assert differences == []


# What requests ask for besides tokens, in turn. The grammars do not end before an answer does.
OPTIONS: tuple[dict[str, Any], ...] = (
    {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3},
    {"parameters": {"json_schema": json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 90})}},
    {"return_logprob": True, "logprob_start_len": 2, "token_ids_logprob": [7, 300]},
    {"return_logprob": True, "top_logprobs_num": 2, "parameters": {"regex": "[a-z ]{500}"}},
    {"return_routed_experts": True, "parameters": {"temperature": 0.8, "sampling_seed": 3, "n": 2}},
    {"return_routed_experts": True, "routed_experts_start_len": 3},
)


def request_with_options(ids: list[int], number: int) -> dict[str, Any]:
    options = dict(OPTIONS[number % len(OPTIONS)])
    return {
        "input_ids": ids,
        "sampling_params": {**LONG, "max_new_tokens": 90, **options.pop("parameters", {})},
        **options,
    }


def logprobs_of(answer: dict[str, Any]) -> dict[str, Any]:
    """Return all log probabilities of an answer, approximately: other rows of the batch may change the last digit."""
    names = [f"{part}_{what}_logprobs" for part in ("input", "output") for what in ("token", "top", "token_ids")]
    return {name: approximate(answer["meta_info"].get(name)) for name in names}


def approximate(value: Any) -> Any:
    """Return nested lists with approximate numbers."""
    if isinstance(value, list | tuple):
        return [approximate(item) for item in value]
    return pytest.approx(value, abs=1e-5) if isinstance(value, float) else value


@pytest.fixture(scope="module")
def whole_sequences(model_path: Callable[[str], str]) -> WholeSequences:
    return WholeSequences(model_path(FAMILIES[0]))


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    """Answers of the first engine, which gets one request after the other."""
    return []


def test_logprobs_grammars_and_reported_experts_survive_pauses_and_suspension(
    kind: str, engine: Any, inputs: list[list[int]], whole_sequences: WholeSequences, alone: list[Any]
) -> None:
    mode = MODES[kind]
    requests = [request_with_options(ids, number) for number, ids in enumerate([*inputs, *inputs[-3:]])]
    if not alone:
        alone += [engine.generate(**request) for request in requests]
    moved = {name: counters(engine).get(name, 0) for name in ("suspensions", "retractions")}
    answers = run_paused(engine, requests, mode)
    moved = {name: counters(engine).get(name, 0) - before for name, before in moved.items()}
    assert (moved["retractions"] > 0) == (mode == "retract")
    flags = engine.plan_manifest()["flags"]
    assert moved["suspensions"] > 0 or not flags["kv_store_bytes"] or flags["decode_kv"] == "streamed"
    for request, answer, before in zip(requests, answers, alone, strict=True):
        for one, expected in zip(*([a] if isinstance(a, dict) else a for a in (answer, before)), strict=True):
            assert one["output_ids"] == expected["output_ids"]
            assert logprobs_of(one) == logprobs_of(expected)
            if "return_routed_experts" in request:
                start, greedy = request.get("routed_experts_start_len", 0), isinstance(answer, dict)
                assert "routed_experts" in one["meta_info"]
                whole_sequences.check(request["input_ids"], one, start=start, greedy=greedy)


def test_retracted_sequences_go_on_with_new_weights(
    engine: Any, inputs: list[list[int]], trained: Path, answers_of_trained: Any, model_path: Callable[[str], str]
) -> None:
    old = ask(engine, inputs)

    async def update() -> None:
        await load_from(engine, trained)

    requests = [{"input_ids": ids, "sampling_params": LONG} for ids in inputs]
    answers = [answer["output_ids"] for answer in run_paused(engine, requests, "retract", update)]
    # Where both weights give the same token, it is not known which of them gave it.
    same = [
        next((n for n, (a, b) in enumerate(zip(now, before, strict=True)) if a != b), len(now))
        for now, before in zip(answers, old, strict=True)
    ]
    assert sum(0 < number < 60 for number in same[:-1]) > 3, "some answers have tokens of both weights"
    left = [number for number, length in enumerate(same) if length < 60]
    begun = [inputs[n] + answers[n][: same[n]] for n in left]
    assert answers_of_trained(begun, [60 - same[n] for n in left]) == [answers[n][same[n] :] for n in left]
    assert ask(engine, inputs) == answers_of_trained(inputs, [60] * len(inputs))
    engine.loop.run_until_complete(load_from(engine, model_path(FAMILIES[0])))
    assert ask(engine, inputs) == old


def test_an_update_without_a_flush_keeps_the_kv_of_running_sequences_and_no_new_prompt_shares_it(
    engine: Any, inputs: list[list[int]], trained: Path, answers_of_trained: Any, model_path: Callable[[str], str]
) -> None:
    weights, plain = load_file(trained / "model.safetensors"), load_file(f"{model_path(FAMILIES[0])}/model.safetensors")
    retractions = counters(engine).get("retractions", 0)
    late = {"input_ids": inputs[8], "sampling_params": LONG}  # the same prompt as the last of those that run
    requests = [*({"input_ids": ids, "sampling_params": LONG} for ids in inputs), late]

    async def update() -> None:
        payload = tensors_for(engine, weights)
        done, message = await engine.tokenizer_manager.update_weights_from_tensor(payload)
        assert done, message

    answers = run_paused(engine, requests, "in_place", update)
    assert [len(answer["output_ids"]) for answer in answers] == [60] * len(requests)
    assert answers[-1]["output_ids"] == answers_of_trained([inputs[8]], [60])[0]
    assert counters(engine).get("retractions", 0) == retractions
    done, message = engine.update_weights_from_tensor(list(plain.items()))
    assert done, message


@by_ranks
def test_weights_can_be_sent_as_the_bytes_of_safetensors_files(
    engine: Any, inputs: list[list[int]], trained: Path, answers_of_trained: Any, model_path: Callable[[str], str]
) -> None:
    old = ask(engine, inputs[:2])
    new, plain = ((Path(path) / "model.safetensors").read_bytes() for path in (trained, model_path(FAMILIES[0])))
    for files in ([new], [new] * engine.server_args.dp_size):
        done, message = engine.update_weights_from_tensor(files, load_format="safetensors")
        assert done, message
        assert ask(engine, inputs[:2]) == answers_of_trained(inputs[:2], [60] * 2)
        done, message = engine.update_weights_from_tensor([plain], load_format="safetensors")
        assert done, message
    done, message = engine.update_weights_from_tensor([plain[:-1]], load_format="safetensors")
    assert not done
    assert "SafetensorError" in message
    assert ask(engine, inputs[:2]) == old


def _unused_port() -> int:
    """Return a port below those that systems give to connections, which might take it before it is listened at."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@by_ranks
def test_a_trainer_broadcasts_new_weights_to_all_ranks(
    engine: Any, inputs: list[list[int]], trained: Path, answers_of_trained: Any, model_path: Callable[[str], str]
) -> None:
    ranks = engine.server_args.dp_size
    weights, plain = load_file(trained / "model.safetensors"), load_file(f"{model_path(FAMILIES[0])}/model.safetensors")
    port = _unused_port()
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
    assert ask(engine, inputs[:4]) == answers_of_trained(inputs[:4], [60] * 4)
    done, message = engine.update_weights_from_distributed(names, dtypes, shapes, group_name=name)
    assert done, message
    trainer.join(10)
    assert ask(engine, inputs[:4]) == old


def test_a_request_aborted_during_a_pause_returns_the_tokens_generated_before(
    kind: str, engine: Any, inputs: list[list[int]], whole_sequences: WholeSequences
) -> None:
    whole = ask(engine, inputs)
    manager = engine.tokenizer_manager

    async def abort() -> None:
        manager.abort_request(abort_all=True)

    options = {"sampling_params": LONG, "return_routed_experts": True}
    requests = [{"input_ids": ids, **options} for ids in [*inputs, inputs[0]]]
    answers = run_paused(engine, requests, MODES[kind], abort)
    reasons = [answer["meta_info"]["finish_reason"]["type"] for answer in answers]
    assert reasons[:-1] == ["abort"] * len(inputs)
    generated = [answer["output_ids"] for answer in answers[:-1]]
    assert any(generated)
    assert generated == [tokens[: len(some)] for tokens, some in zip(whole, generated, strict=True)]
    for ids, answer in zip(inputs, answers, strict=False):
        if answer["output_ids"]:
            assert "routed_experts" in answer["meta_info"]
            whole_sequences.check(ids, answer)


@by_ranks
def test_weights_that_cannot_be_loaded_are_refused_by_name_and_the_engine_goes_on(
    engine: Any, inputs: list[list[int]]
) -> None:
    old = ask(engine, inputs[:2])
    done, message = engine.update_weights_from_tensor([("no.such.weight", torch.ones(3))], load_format="direct")
    assert not done
    assert "no.such.weight" in message
    with pytest.raises(ValueError, match="memory saver is for GPUs"):
        engine.release_memory_occupation()
    assert engine.flush_cache().success
    assert ask(engine, inputs[:2]) == old
    assert json.dumps(engine.get_weights_by_name("model.norm.weight"))
