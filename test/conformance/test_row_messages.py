"""Rows sent from rank to rank arrive whole and in order, block no rank, and give the collective exchange's bits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from dispatch_cases import Case
from dispatch_reference import expected_output, same_bits
from message_exchange import SOON_S, MessageExchange
from rank_processes import ProcessCache, implementations
from rank_work import exchange_both_ways
from row_wires import Wires

from sgl_batch.core.topology import RankPart, Topology
from sgl_batch.distributed.rank_errors import PeerTimeout, TransferError
from sgl_batch.layers.moe.token_dispatcher.point_to_point import Rows
from sgl_batch.layers.moe.token_dispatcher.row_mailbox import MOST_IN_FLIGHT, RowMailbox

HIDDEN, TOP_K = 4, 3
CASE = Case(name="by messages", dtype=torch.bfloat16, routing="padded", top_k=8)
# Two ranks have attention, two have experts.
SEPARATE_ROLES = Topology(
    (*(RankPart(attention_rank=rank) for rank in range(2)), *(RankPart(expert_shard=shard) for shard in range(2)))
)


def rows(value: int, *, num_rows: int = 2, dtype: torch.dtype = torch.bfloat16) -> Rows:
    ids_RK = torch.full((num_rows, TOP_K), value, dtype=torch.int32)
    weights_RK = torch.full((num_rows, TOP_K), value / 4)
    return Rows(layer=value, x_RM=torch.full((num_rows, HIDDEN), value).to(dtype), ids_RK=ids_RK, weights_RK=weights_RK)


def assert_same(got: Rows, sent: Rows) -> None:
    assert got.layer == sent.layer
    for one, other in ((got.x_RM, sent.x_RM), (got.ids_RK, sent.ids_RK), (got.weights_RK, sent.weights_RK)):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_each_pair_of_ranks_arrive_in_order_whatever_the_delays(seed: int) -> None:
    num_ranks, count = 3, 30

    def work(rank: int, mailbox: RowMailbox) -> None:
        draw, sent = random.Random(seed * num_ranks + rank), 0
        peers = [peer for peer in range(num_ranks) if peer != rank]
        to_send = draw.sample(peers * count, count * len(peers))
        numbers, expected = dict.fromkeys(peers, 0), dict.fromkeys(peers, 0)
        while sent < len(to_send) or sum(expected.values()) < count * len(peers):
            if sent < len(to_send) and (draw.random() < 0.6 or sum(expected.values()) == count * len(peers)):
                target = to_send[sent]
                mailbox.send(target, rows(numbers[target], num_rows=1 + numbers[target] % 3))
                numbers[target] += 1
                sent += 1
            else:
                source, got = mailbox.receive(SOON_S)
                assert_same(got, rows(expected[source], num_rows=1 + expected[source] % 3))
                expected[source] += 1

    with Wires(num_ranks, seed) as wires:
        wires.on_all(work)
        assert wires.most_in_flight <= MOST_IN_FLIGHT


def test_ranks_that_send_more_than_may_be_in_flight_before_they_receive_do_not_deadlock() -> None:
    count = 5 * MOST_IN_FLIGHT

    def work(rank: int, mailbox: RowMailbox) -> None:
        handles = [mailbox.send(1 - rank, rows(number)) for number in range(count)]
        handles[-1].wait(SOON_S)  # meanwhile it receives what the other rank sends
        assert all(handle.done for handle in handles[:-MOST_IN_FLIGHT])
        for number in range(count):
            assert_same(mailbox.receive(SOON_S)[1], rows(number))

    with Wires(2, seed=1) as wires:
        wires.on_all(work)
        assert wires.most_in_flight == MOST_IN_FLIGHT


def test_rows_are_received_only_with_their_data_and_after_all_rows_sent_before() -> None:
    with Wires(2, seed=0) as wires:
        wires.held.add(((0, 1), 0))
        first, second = wires.mailboxes
        late, soon = first.send(1, rows(7)), first.send(1, rows(8, dtype=torch.float32))
        with pytest.raises(PeerTimeout, match="for rows"):
            second.receive(0.05)
        soon.wait(SOON_S)  # the data of the second message has arrived
        assert not late.done
        with pytest.raises(PeerTimeout, match="for a send to end"):
            late.wait(0.02)
        with pytest.raises(PeerTimeout, match="for rows"):
            second.receive(0.02)
        wires.release((0, 1), 0)
        for sent in (rows(7), rows(8, dtype=torch.float32)):
            assert_same(second.receive(SOON_S)[1], sent)


def test_a_broken_wire_is_an_error_on_both_ranks() -> None:
    with Wires(2, seed=0) as wires:
        wires.failing.add(((0, 1), 0))
        first, second = wires.mailboxes
        handle = first.send(1, rows(0))
        for call in (lambda: second.receive(SOON_S), lambda: handle.wait(SOON_S), lambda: first.send(1, rows(1))):
            with pytest.raises(TransferError, match="the wire broke"):
                call()


@pytest.mark.parametrize(
    "topology", [Topology.uniform(2), Topology.uniform(4), SEPARATE_ROLES], ids=["2", "4", "2 and 2"]
)
@pytest.mark.parametrize("seed", range(3))
def test_experts_through_messages_give_the_bits_of_the_collective_exchange(topology: Topology, seed: int) -> None:
    with Wires(topology.num_ranks, seed) as wires:
        outputs = wires.on_all(lambda rank, mailbox: MessageExchange(topology, rank, mailbox, CASE).run())
    out_NM = torch.cat([out_TM for out_TM in outputs if out_TM is not None])
    assert same_bits(out_NM, expected_output(CASE, topology.num_expert_shards))


def test_two_processes_get_the_same_bits_by_messages_and_by_collectives(
    process_cache: ProcessCache, tmp_path: Path
) -> None:
    gloo = next(each for each in implementations() if str(each) == "gloo-2")
    results = process_cache.ranks(gloo).call(exchange_both_ways, CASE, str(tmp_path))
    for by_messages, by_collectives in results:
        assert same_bits(by_messages, by_collectives)
    assert same_bits(torch.cat([by_messages for by_messages, _ in results]), expected_output(CASE, 2))
