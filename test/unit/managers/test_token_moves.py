"""A sequence that moves without KV leaves its rank whole, and is queued with its tokens where it arrives."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scheduler_stand_ins import scheduler_stand_in

from sgl_batch.config import BatchConfig
from sgl_batch.core.kv_policy import DeviceOnly
from sgl_batch.core.plan_in_force import PlanInForce
from sgl_batch.core.sequence import Status
from sgl_batch.kv_offload.device_kv import DeviceKV
from sgl_batch.managers.boundary_executor import BoundaryExecutor
from sgl_batch.managers.token_moves import TokenMoves
from sgl_batch.managers.trace import TraceWriter
from sgl_batch.metrics.counters import Counters
from sgl_batch.migration.store import Refusal
from sgl_batch.sglang_adapter import bootstrap, moving

with bootstrap.importing():
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams


class Rank:
    """A rank's scheduler and executor, and its moves; those with KV are noted."""

    def __init__(self) -> None:
        in_force, counters = PlanInForce(BatchConfig()), Counters()
        in_force.fit(page_size=64, max_running=512, can_reenter=True)
        self.scheduler: Any = scheduler_stand_in(tokenizer=None)
        self.scheduler.model_config = SimpleNamespace(hf_eos_token_id={0}, vocab_size=512)
        pool = SimpleNamespace(layer_num=1, page_parts=lambda _: (torch.zeros(2, 64),), dtype=torch.float32)
        self.scheduler.token_to_kv_pool_allocator.get_kvcache = lambda: pool
        self.scheduler.grammar_manager.process_req_with_grammar = lambda _: False
        kv = DeviceKV(self.scheduler, counters)
        self.executor = BoundaryExecutor(self.scheduler, in_force, counters, TraceWriter(None), kv, DeviceOnly())
        self.calls: list[tuple[str, str]] = []
        with_kv: Any = SimpleNamespace(
            begin=lambda names, _: self.calls.append(("begin", ",".join(names))),
            release=lambda name: self.calls.append(("release", name)),
        )
        self.moves = TokenMoves(with_kv, self.scheduler, self.executor, counters)
        self.counters = counters

    def queue(self, name: str, *, tokens: int = 10, generated: tuple[int, ...] = ()) -> Any:
        request = Req(name, "", array("q", range(tokens)), SamplingParams(max_new_tokens=40), vocab_size=512)
        request.output_ids = array("q", generated)
        moving.queue(self.scheduler, request)
        self.executor.enqueue(request)
        return request


def move(source: Rank, target: Rank, name: str) -> None:
    source.moves.prepare([name])
    source.moves.begin([name], source.scheduler.running_batch)
    header = source.moves.export(name).header
    reservation = target.moves.reserve(header)
    assert not isinstance(reservation, Refusal)
    assert list(reservation.tensors) == []
    target.moves.adopt(header, reservation)
    source.moves.release(name)


def test_a_queued_sequence_is_queued_last_where_it_arrives():
    source, target = Rank(), Rank()
    for name in "abc":
        source.queue(name)
    target.queue("d")
    move(source, target, "b")
    assert [request.rid for request in source.scheduler.waiting_queue] == ["a", "c"]
    assert [s.sequence_id for s in source.executor.state(source.scheduler.running_batch).queued] == ["a", "c"]
    assert [s.sequence_id for s in target.executor.state(target.scheduler.running_batch).queued] == ["d", "b"]
    assert "b" not in source.executor.table
    assert target.executor.table["b"].status is Status.QUEUED


def test_a_sequence_that_had_kv_is_queued_with_its_tokens_and_counts_what_it_lost():
    source, target = Rank(), Rank()
    request = source.queue("a", generated=(5, 6, 7))
    sequence = source.executor.table["a"]
    sequence.status, request.kv_committed_len = Status.RUNNING, 12
    move(source, target, "a")
    assert source.calls == [("begin", ""), ("release", "a")], "its own rank frees its KV"
    arrived = target.executor.table["a"]
    assert (arrived.status, arrived.kv_tokens, arrived.lost_tokens) == (Status.QUEUED, 12, 12)
    assert list(target.executor.table.request_named("a").output_ids) == [5, 6, 7]
    assert target.counters.as_dict()["counters"]["sequences_moved_as_tokens"] == 1


def test_a_sequence_that_is_not_taken_leaves_nothing_behind():
    source, target = Rank(), Rank()
    source.queue("a")
    source.moves.prepare(["a"])
    header = source.moves.export("a").header
    target.moves.cancel(header, target.moves.reserve(header))
    assert "a" in source.executor.table
    assert target.executor.is_empty


@pytest.mark.parametrize("extra_key", [None, "sgl_batch.choice:1:3:g"])
def test_choices_that_share_a_prompt_stay_in_their_queue(extra_key: str | None):
    source = Rank()
    request = Req("a", "", array("q", range(9)), SamplingParams(max_new_tokens=4), vocab_size=512, extra_key=extra_key)
    source.scheduler.waiting_queue.append(request)
    source.executor.enqueue(request)
    queued = source.executor.state(source.scheduler.running_batch).queued
    found = source.executor.table.queue_movable(queued, source.executor.plan)
    assert [item.sequence.sequence_id for item in found] == ([] if extra_key else ["a"])
