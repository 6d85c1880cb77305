"""A decision reads the sequences that run and those that it takes, never all that wait."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sequence_builders import plan, sequence

from sgl_batch.core.decide import decide
from sgl_batch.core.decode_streaming import StreamingChoice
from sgl_batch.core.kv_policy import DeviceOnly, KVPolicy
from sgl_batch.core.kv_state import KVState
from sgl_batch.core.page_boundary import State
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.sequence import SequenceState, Status
from sgl_batch.core.sequence_queue import SequencesView
from sgl_batch.core.store_policies import Exclusive, Inclusive, Streamed

PLAN = plan(b_moe_prefill=200, b_moe=8, boundary_tokens=4, page_size=8)


class CountedView(SequencesView):
    """A view that counts the sequences that are read."""

    num_read = 0

    def __iter__(self) -> Iterator[SequenceState]:
        for one in super().__iter__():
            self.num_read += 1
            yield one


def waiting(count: int, first: int, status: Status) -> CountedView:
    made = [sequence(first + i, prompt=10, new=40, status=status) for i in range(count)]
    return CountedView({one.sequence_id: one for one in made})


def num_read(policy: KVPolicy, *, streams: bool, queued: int, ready: int) -> int:
    """Return how many waiting sequences one decision reads at a boundary with 4 running sequences."""
    running = [sequence(i, prompt=10, new=40, status=Status.RUNNING) for i in range(4)]
    device, admission = PageLedger(60, 8), PageLedger(1 << 30, 8)
    for one in running:
        device.reserve(one.sequence_id, 0 if streams else 3)
    queue = waiting(queued, 1_000_000, Status.QUEUED)
    ready_view = waiting(ready, 10, Status.SUSPENDED)
    state = State(
        queued=queue,
        ready=ready_view,
        running=len(running),
        steps=4,
        request_slots=64,
        free_request_slots=32,
        filling=False,
    )
    kv = KVState(
        device=device,
        admission=admission,
        runners=lambda: running,
        estimate_shared=lambda leaders: [next(leaders) for _ in range(20)] and None,
        store_free=1 << 20,
        streams=streams,
    )
    actions = decide(state, kv, PLAN, policy)
    assert len(actions) > 1 or not ready, "a boundary"
    return queue.num_read + ready_view.num_read


@pytest.mark.parametrize(
    ("policy", "streams"),
    [(Inclusive, False), (Exclusive, False), (Streamed, True), (lambda: Streamed(StreamingChoice()), False)],
    ids=["inclusive", "exclusive", "streamed", "streamed by choice"],
)
def test_a_boundary_reads_as_few_of_100_000_waiting_sequences_as_of_1_000(policy, streams):
    few = num_read(policy(), streams=streams, queued=0, ready=1_000)
    assert 0 < few < 50
    assert num_read(policy(), streams=streams, queued=0, ready=100_000) == few


@pytest.mark.parametrize("policy", [DeviceOnly, Inclusive, Exclusive])
def test_a_prefill_group_is_made_from_the_head_of_the_queue(policy):
    few = num_read(policy(), streams=False, queued=1_000, ready=0)
    assert 0 < few < 80
    assert num_read(policy(), streams=False, queued=100_000, ready=0) == few


def test_the_sums_of_the_page_ledger_follow_each_change():
    """Each boundary reads its sums, with a reservation for every waiting sequence."""
    ledger = PageLedger(1 << 30, 8, overflow_pages=1 << 20)
    for number in range(1_000):
        ledger.reserve(f"s{number}", 1 + number % 7)
    ledger.resize("s3", 20)
    ledger.release("s4")
    assert ledger.reserved_pages == sum(1 + number % 7 for number in range(1_000)) - 4 + 20 - 5
    assert ledger.largest == 20
    ledger.release("s3")
    assert ledger.largest == 7
