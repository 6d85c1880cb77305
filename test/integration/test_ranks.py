"""Several ranks give one rank's tokens, wherever sequences run or move to, and when ranks are held up."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from sgl_batch.errors import ConfigError

from .background import in_background
from .conftest import FAMILIES, Prompts, Reference
from .test_parity import generate

pytestmark = pytest.mark.engine

SAMPLED = {
    "temperature": 0.9,
    "top_p": 0.95,
    "frequency_penalty": 0.4,
    "presence_penalty": 0.3,
    "repetition_penalty": 1.1,
    "min_new_tokens": 12,
    "max_new_tokens": 30,
    "ignore_eos": True,
}


def ranks(number: int, **settings: Any) -> dict[str, Any]:
    """Return the flags of an engine of several ranks on which every sequence moves at every boundary."""
    sizes = {"tp_size": number, "dp_size": number, "ep_size": number, "enable_dp_attention": True}
    return {**sizes, "migration": "always", "rank_timeout_s": 60.0, **settings}


@contextmanager
def held_up_at_random(processes: list[psutil.Process]) -> Iterator[None]:
    """Stop random processes for up to a tenth of a second each, as a busy machine would."""
    draw = random.Random(0)

    def hold_up(over: threading.Event) -> None:
        while not over.is_set():
            process = draw.choice(processes)
            process.send_signal(signal.SIGSTOP)
            over.wait(draw.uniform(0.001, 0.1))
            process.send_signal(signal.SIGCONT)
            over.wait(draw.uniform(0.001, 0.05))

    with in_background(hold_up):
        yield


def rank_processes(engine: Any) -> list[psutil.Process]:
    found = [process for process in engine.own_processes if "scheduler" in " ".join(process.cmdline())]
    return sorted(found, key=lambda process: process.pid)


def share_weights(engine: Any) -> bool:
    """Return whether all ranks map the same weights and none has a page of them for itself; False if none maps any."""
    found = [shared_weights(process.pid) for process in rank_processes(engine)]
    files = {file for file, _ in found}
    return len(files) == 1 and None not in files and all(private == 0 for _, private in found)


def shared_weights(pid: int) -> tuple[str | None, int]:
    """Return which memory a process shares with others for weights, if any, and of how much it has copies, in kB."""
    file, private, is_inside = None, 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            is_inside = "memfd:sgl-batch-weights" in line
            file = words[4] if is_inside else file
        elif is_inside and words[0] == "Anonymous:":
            private += int(words[1])
    return file, private


@pytest.mark.parametrize(("family", "number", "dispatcher"), [(FAMILIES[2], 2, "gloo"), (FAMILIES[1], 4, "shared")])
def test_greedy_tokens_of_ranks_equal_huggingface_with_every_sequence_moved_at_every_boundary(
    family: str,
    number: int,
    dispatcher: str,
    batch_engine: Callable[..., Any],
    reference: Callable[[str, str], Reference],
    prompts: Prompts,
) -> None:
    engine = batch_engine(family, 7, **ranks(number, token_dispatcher=dispatcher))
    before = engine.batch_stats()["counters"]
    assert generate(engine, prompts) == reference(family, "float32").tokens
    stats = engine.batch_stats()
    moved = stats["counters"]["sequences_arrived"] - before.get("sequences_arrived", 0)
    assert moved >= len(prompts.input_ids), "sequences moved"
    assert stats["counters"]["sequences_departed"] == stats["counters"]["sequences_arrived"]
    assert stats["free_pages"] == stats["total_pages"]
    assert len(stats["ranks"]) == number
    assert all(rank["counters"]["decode_rows"] > 0 for rank in stats["ranks"])
    assert all(sum(rank["tokens_per_expert"]) > 0 for rank in stats["ranks"])


def test_bfloat16_tokens_of_two_ranks_are_those_of_one(batch_engine: Callable[..., Any], prompts: Prompts) -> None:
    one = generate(batch_engine(FAMILIES[0], 7, dtype="bfloat16"), prompts)
    engine = batch_engine(FAMILIES[0], 7, dtype="bfloat16", **ranks(2))
    assert generate(engine, prompts) == one
    counters = [rank["counters"] for rank in engine.batch_stats()["ranks"]]
    assert all(counts["recorded_passes"] > 0 for counts in counters), "ranks decode from records"
    assert share_weights(engine)
    with held_up_at_random(rank_processes(engine)):
        assert generate(engine, prompts) == one


def test_sampled_tokens_with_penalties_do_not_depend_on_moves(
    batch_engine: Callable[..., Any], prompts: Prompts
) -> None:
    sampling = [{**SAMPLED, "sampling_seed": seed} for seed in range(len(prompts.input_ids))]

    def sampled(engine: Any) -> list[list[int]]:
        results = engine.generate(input_ids=prompts.input_ids, sampling_params=sampling)
        return [result["output_ids"] for result in results]

    one = sampled(batch_engine(FAMILIES[0], 7, dtype="bfloat16"))
    assert sampled(batch_engine(FAMILIES[0], 7, dtype="bfloat16", **ranks(2))) == one


def test_choices_of_a_prompt_share_it_on_the_rank_that_computes_it_and_move_apart(
    batch_engine: Callable[..., Any], prompts: Prompts
) -> None:
    sampling = {"temperature": 0.8, "max_new_tokens": 20, "n": 3, "sampling_seed": 5}

    def chosen(engine: Any) -> list[list[int]]:
        results = engine.generate(input_ids=prompts.input_ids[6:10], sampling_params=sampling)
        return [result["output_ids"] for result in results]

    one = chosen(batch_engine(FAMILIES[0], 7, dtype="bfloat16"))
    engine = batch_engine(FAMILIES[0], 7, dtype="bfloat16", **ranks(2))
    before = engine.batch_stats()["counters"]
    assert chosen(engine) == one
    stats = engine.batch_stats()
    counted = {name: stats["counters"][name] - before.get(name, 0) for name in ("prompts_shared", "sequences_arrived")}
    assert counted["prompts_shared"] == 8
    assert counted["sequences_arrived"] >= 12, "every choice moved"
    assert stats["free_pages"] == stats["total_pages"]


# The grammars do not end before an answer does.
ASKED: tuple[dict[str, Any], ...] = (
    {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3},
    {"parameters": {"json_schema": json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 90})}},
    {"return_logprob": True, "logprob_start_len": 2, "token_ids_logprob": [7, 300]},
    {"return_logprob": True, "top_logprobs_num": 2, "parameters": {"regex": "[a-z ]{500}"}},
    {"return_routed_experts": True, "parameters": {"temperature": 0.8, "sampling_seed": 3, "n": 2}},
    {"return_routed_experts": True, "routed_experts_start_len": 3, "parameters": {"frequency_penalty": 0.5}},
)
REPORTED = [f"{part}_{what}_logprobs" for part in ("input", "output") for what in ("token", "top", "token_ids")]


def approximate(value: Any) -> Any:
    """Return nested lists with approximate numbers."""
    if isinstance(value, list | tuple):
        return [approximate(item) for item in value]
    return pytest.approx(value, abs=1e-5) if isinstance(value, float) else value


def reported(engine: Any, prompts: Prompts, **more: Any) -> list[Any]:
    """Return the tokens of answers, and all else that they report.

    Log probabilities are approximate: the other rows of a batch may change their last digit, also on one rank. In
    bfloat16 that changes which of two equal ones comes first.
    """
    asked = [dict(ASKED[number % len(ASKED)]) for number in range(len(prompts.input_ids))]
    parameters = {"temperature": 0, "max_new_tokens": 70, "ignore_eos": True, **more}
    sampling = [{**parameters, **options.pop("parameters", {})} for options in asked]

    async def one(ids: list[int], sampling_params: dict[str, Any], options: dict[str, Any]) -> Any:
        return await engine.async_generate(input_ids=ids, sampling_params=sampling_params, **options)

    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*map(one, prompts.input_ids, sampling, asked))

    answers = engine.loop.run_until_complete(all_at_once())
    choices = [choice for answer in answers for choice in (answer if isinstance(answer, list) else [answer])]
    return [
        (
            choice["output_ids"],
            choice["meta_info"].get("routed_experts"),
            {name: approximate(choice["meta_info"].get(name)) for name in REPORTED},
        )
        for choice in choices
    ]


@pytest.mark.parametrize(
    ("store", "migration"),
    [({}, "always"), ({}, "prepared"), ({}, "as-tokens"), ({"kv_store_bytes": 64 << 20}, "always")],
    ids=["at once", "after copies", "as tokens", "through a store"],
)
def test_log_probabilities_grammars_and_reported_experts_do_not_depend_on_moves(
    store: dict[str, int],
    migration: str,
    started: Callable[..., Any],
    model_path: Callable[[str], str],
    prompts: Prompts,
) -> None:
    settings = {
        "model_path": model_path(FAMILIES[0]),
        "dtype": "float32",
        "page_size": 16,
        "b_moe_prefill": 700,
        "b_moe_decode": 8,
        "boundary_tokens": 8,
        "max_total_tokens": 16384,
        "enable_return_routed_experts": True,
        **store,
    }
    one = reported(started(**settings), prompts)
    engine = started(**settings, **ranks(2, migration=migration))
    assert reported(engine, prompts) == one
    stats = engine.batch_stats()
    assert stats["counters"]["sequences_arrived"] >= 2 * len(one)
    assert (stats["counters"].get("pages_copied_ahead", 0) > 0) == (migration == "prepared")
    assert (stats["counters"]["recomputed_tokens_planned"] > 0) == (migration == "as-tokens")
    assert stats["counters"]["recomputed_tokens_unplanned"] == 0
    assert stats["free_pages"] == stats["total_pages"]


def test_answers_of_two_ranks_do_not_depend_on_drafts(batch_engine: Callable[..., Any], prompts: Prompts) -> None:
    engine = batch_engine(FAMILIES[0], 7, dtype="bfloat16", **ranks(2))
    without = generate(engine, prompts)
    engine.set_plan(speculate="5")
    try:
        before = engine.batch_stats()["counters"].get("drafts_accepted", 0)
        assert generate(engine, prompts) == without
        stats = engine.batch_stats()
    finally:
        engine.set_plan(speculate="off")
    assert stats["counters"]["drafts_accepted"] > before
    assert stats["free_pages"] == stats["total_pages"]


def test_an_aborted_request_frees_its_pages_on_whichever_rank_it_is(
    batch_engine: Callable[..., Any], prompts: Prompts
) -> None:
    engine = batch_engine(FAMILIES[0], 7, dtype="bfloat16", **ranks(2))

    async def begin_and_abort() -> list[str]:
        sampling = {"temperature": 0, "max_new_tokens": 2000, "ignore_eos": True}
        streams = [
            await engine.async_generate(input_ids=ids, sampling_params=sampling, stream=True)
            for ids in prompts.input_ids[:6]
        ]
        for stream in streams:
            await anext(stream)
        engine.tokenizer_manager.abort_request(abort_all=True)
        reasons = []
        for stream in streams:
            async for out in stream:
                last = out
            reasons.append(last["meta_info"]["finish_reason"]["type"])
        return reasons

    assert engine.loop.run_until_complete(begin_and_abort()) == ["abort"] * 6
    stats = engine.batch_stats()
    assert stats["free_pages"] == stats["total_pages"]


def test_sizes_that_differ_are_refused_with_the_flags_that_work(batch_engine: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"give --tp 2 --dp 2 --ep 2 --enable-dp-attention"):
        batch_engine(FAMILIES[0], tp_size=2)
