"""One batch over real pages: each sequence has one owner under delays, duplicates, refusals, failures and deaths."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_wires import MemoryChannel, MemoryTransport, complete
from page_store import PageStore

from sgl_batch.distributed.rank_errors import BadMessage, PeerLost, PeerTimeout, TransferError
from sgl_batch.migration.endpoints import Endpoints
from sgl_batch.migration.messages import Accept, Commit, MigrationBatchId, Offer, Refuse
from sgl_batch.migration.outcome import Result
from sgl_batch.migration.protocol import ReceiverState, SenderState
from sgl_batch.migration.receiver import ReceiverEndpoint
from sgl_batch.migration.sender import SenderEndpoint

BATCH = MigrationBatchId(boundary=7, source=0, target=1)
NUM_STEPS = 40
# A fault: its step, kind and side (0 sends, 1 receives), and how many of the victim's last messages are lost with it.
FAULT = st.tuples(
    st.integers(0, 20),
    st.sampled_from(["transfer", "timeout", "deaf", "again", "death"]),
    st.integers(0, 1),
    st.integers(0, 3),
)


class OneBatch:
    """A sender's and a receiver's side in one process; the test decides every delivery and every fault."""

    def __init__(self, sizes: list[int], room: int) -> None:
        self.stores = [PageStore(sum(sizes)), PageStore(room)]
        names = [f"s{index}" for index in range(len(sizes))]
        for name, size in zip(names, sizes, strict=True):
            self.stores[0].put(name, size)
        self.before = self.stores[0].everything()
        self.channels = [MemoryChannel(0), MemoryChannel(1)]
        self.transports = [MemoryTransport(), MemoryTransport()]
        ends = [
            Endpoints(channel=channel, transport=transport, store=store, step_timeout_s=1)
            for channel, transport, store in zip(self.channels, self.transports, self.stores, strict=True)
        ]
        self.sides = [SenderEndpoint(BATCH, names, ends[0]), ReceiverEndpoint(BATCH, names, ends[1])]
        self.alive = [True, True]
        self.delivered = [[], []]
        self.sides[0].start()

    def steps(self):
        """Yield everything that can happen next without a fault."""
        for side in range(2):
            if self.alive[side]:
                yield lambda side=side: self.sides[side].work(may_transfer=True)
                if self.queue(side) and 1 - side not in self.channels[side].dead:
                    yield lambda side=side: self.deliver(side)
                if not self.alive[1 - side]:
                    yield lambda side=side: self.learn_of_death(side)
        sent = self.transports[0].sends.get((1, BATCH.boundary))
        expected = self.transports[1].recvs.get((0, BATCH.boundary))
        if sent and expected and not sent.done and not expected.done:
            yield lambda: complete(sent, expected)

    def queue(self, side):
        return self.channels[1 - side].queues.get(side, [])

    def deliver(self, side):
        message = self.queue(side).popleft()
        self.delivered[side].append(message)
        self.sides[side].handle(message)

    def learn_of_death(self, side):
        self.channels[side].dead.add(1 - side)
        if not self.sides[side].ended:
            self.sides[side].fail(PeerLost(1 - side, awaiting=self.sides[side].awaiting, seconds=0))

    def go_wrong(self, kind, side, lost):
        if not self.alive[side]:
            return
        peer = 1 - side
        if kind == "transfer":
            halves = [*self.transports[side].sends.values(), *self.transports[side].recvs.values()]
            if halves and not halves[0].done:
                halves[0].end(TransferError(peer, "connection closed"))
        elif kind == "timeout" and not self.sides[side].ended:
            self.sides[side].fail(PeerTimeout([peer], awaiting=self.sides[side].awaiting, seconds=1))
        elif kind == "deaf":
            self.channels[side].deaf ^= {peer}
        elif kind == "again" and self.delivered[side] and peer not in self.channels[side].dead:
            self.sides[side].handle(self.delivered[side][lost % len(self.delivered[side])])
        elif kind == "death" and all(self.alive):
            self.alive[side] = False
            for _ in range(min(lost, len(self.queue(peer)))):
                self.queue(peer).pop()

    def check_owners(self):
        sender, receiver = self.sides
        ends = [{outcome.sequence_id: outcome for outcome in side.outcomes()} for side in self.sides]
        for name in self.before:
            assert ends[1][name].owned_here == (name in self.stores[1].headers)
            assert (ends[0][name].result is Result.RELEASED) == (name not in self.stores[0].headers)
            offered = sender.state in (SenderState.OFFERED, SenderState.SENDING)
            claims = (ends[0][name].owned_here or offered) + ends[1][name].owned_here
            if ends[0][name].result is Result.RECLAIMED:
                assert not self.alive[1]
            else:
                assert claims <= 1
            if all(self.alive) and claims == 0:  # Commit is on its way, or cannot be sent without a connection
                assert (sender.state, receiver.state) == (SenderState.COMMITTING, ReceiverState.STORED)

    def check_contents(self):
        for store, side in zip(self.stores, self.sides, strict=True):
            for name, fingerprint in store.everything().items():
                assert fingerprint == self.before[name]
            if side.ended:
                store.check_account(reserved=0)


@settings(max_examples=300, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    room=st.integers(0, 8),
    picks=st.lists(st.integers(0, 11), min_size=NUM_STEPS, max_size=NUM_STEPS),
    faults=st.lists(FAULT, max_size=3),
)
def test_each_sequence_has_one_owner_whatever_goes_wrong(sizes, room, picks, faults):
    world = OneBatch(sizes, room)
    for number, pick in enumerate(picks):
        for step, kind, side, lost in faults:
            if step == number:
                world.go_wrong(kind, side, lost)
        steps = list(world.steps())
        if steps:
            steps[pick % len(steps)]()
        world.check_owners()
    world.check_contents()


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    room=st.integers(0, 8),
    picks=st.lists(st.integers(0, 11), min_size=NUM_STEPS, max_size=NUM_STEPS),
)
def test_without_faults_only_lack_of_room_keeps_a_sequence_back(sizes, room, picks):
    world = OneBatch(sizes, room)
    for pick in picks:
        steps = list(world.steps())
        if steps:
            steps[pick % len(steps)]()
    while not all(side.ended for side in world.sides):
        for step in list(world.steps()):
            step()
    world.check_owners()
    world.check_contents()
    assert [failure for side in world.sides for failure in side.failures] == []
    taken = 0
    for size, outcome in zip(sizes, world.sides[0].outcomes(), strict=True):
        fits = taken + size <= room
        taken += size if fits else 0
        assert outcome.result is (Result.RELEASED if fits else Result.KEPT)
        assert outcome.reason == ("" if fits else f"{size} pages are needed, {room - taken} are free")


@settings(max_examples=100, deadline=None)
@given(
    picks=st.lists(st.integers(0, 11), min_size=NUM_STEPS, max_size=NUM_STEPS),
    death=st.tuples(st.integers(0, 20), st.integers(0, 1), st.integers(0, 3)),
)
def test_the_survivor_of_a_death_is_never_left_in_doubt(picks, death):
    world = OneBatch([2, 1], room=3)
    step, victim, lost = death
    for number, pick in enumerate(picks):
        if number == step:
            world.go_wrong("death", victim, lost)
        steps = list(world.steps())
        if steps:
            steps[pick % len(steps)]()
    survivor = 1 - victim
    world.learn_of_death(survivor)
    assert world.sides[survivor].ended
    world.check_owners()
    world.check_contents()


@pytest.mark.parametrize(
    "message",
    [
        Commit(batch=BATCH),
        Accept(batch=BATCH, refused={"a stranger": "it is not offered"}),
        Accept(batch=BATCH, refused={"s0": "no room", "s1": "no room"}),
        Refuse(batch=BATCH, refused={"s0": "no room"}),
    ],
    ids=["wrong kind", "unknown sequence", "accepts nothing", "refuses only a part"],
)
def test_a_sender_that_gets_an_invalid_answer_keeps_its_sequences_and_names_the_receiver(message):
    world = OneBatch([2, 1], room=3)
    sender = world.sides[0]
    sender.handle(message)
    assert sender.state is SenderState.KEPT
    (failure,) = sender.failures
    assert isinstance(failure, BadMessage)
    assert failure.rank == 1
    assert [outcome.result for outcome in sender.outcomes()] == [Result.KEPT, Result.KEPT]


@pytest.mark.parametrize(
    "message", [Commit(batch=BATCH), Offer(batch=BATCH, headers=[])], ids=["too early", "other sequences"]
)
def test_a_receiver_that_gets_an_invalid_message_adopts_nothing_and_names_the_sender(message):
    world = OneBatch([2, 1], room=3)
    receiver = world.sides[1]
    receiver.handle(message)
    assert receiver.state is ReceiverState.DROPPED
    (failure,) = receiver.failures
    assert isinstance(failure, BadMessage)
    assert failure.rank == 0
    world.stores[1].check_account(reserved=0)
