"""Tensors arrive as they were sent, in order, during collectives of other groups; a dead or silent peer is an error."""

from __future__ import annotations

import threading

import pytest
import torch
from gloo_pairs import both, gloo_groups, peer_that_dies_after, transports

from sgl_batch.distributed.group_transport import CHUNK_BYTES, GroupTransport, chunks_of
from sgl_batch.distributed.rank_errors import PeerTimeout, TransferError

WAIT_S = 60.0
DTYPES = (torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn, torch.int64)


def pages(num_pages: int, value: float) -> list[torch.Tensor]:
    return [torch.full((2, 8, 16), value + page, dtype=torch.bfloat16) for page in range(num_pages)]


def empty_like(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.zeros_like(tensor) for tensor in tensors]


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.flatten().contiguous().view(torch.uint8).numpy().tobytes()


def test_tensors_of_all_kinds_arrive_as_they_were_sent():
    sent = [torch.randint(0, 100, (3, 5, size), dtype=torch.int64).to(dtype) for dtype in DTYPES for size in (1, 7, 64)]
    sent += [torch.tensor(3.5), torch.empty(0, 4), torch.arange(24.0).view(4, 6).T, torch.arange(40)[::3]]
    received = [torch.zeros_like(tensor) for tensor in sent]
    first, second = transports(2)
    transfers = [first.send(sent, 1, tag=3), second.recv(received, 0, tag=3)]
    for transfer in transfers:
        transfer.wait(WAIT_S)
    for before, after in zip(sent, received, strict=True):
        assert bytes_of(before) == bytes_of(after)


def test_only_the_given_views_into_a_pool_are_written():
    pool = torch.zeros(6, 4, 8)
    sent = [torch.full((4, 8), 1.0), torch.full((4, 8), 2.0)]
    first, second = transports(2)
    transfers = [second.recv([pool[4], pool[1]], 0, tag=1), first.send(sent, 1, tag=1)]
    for transfer in transfers:
        transfer.wait(WAIT_S)
    assert [page.unique().tolist() for page in pool] == [[0], [2], [0], [0], [1], [0]]


def test_lists_longer_than_a_chunk_arrive_whole():
    sent = [torch.full((CHUNK_BYTES // 3,), value, dtype=torch.uint8) for value in range(1, 8)]
    sent.insert(2, torch.randint(0, 255, (2 * CHUNK_BYTES + 1,), dtype=torch.uint8))
    received = empty_like(sent)
    first, second = transports(2)
    transfers = [first.send(sent, 1, tag=0), second.recv(received, 0, tag=0)]
    for transfer in transfers:
        transfer.wait(WAIT_S)
        assert transfer.moved_bytes == sum(tensor.nbytes for tensor in sent)
    assert all(torch.equal(before, after) for before, after in zip(sent, received, strict=True))


def test_both_directions_and_several_peers_run_at_once():
    ends = transports(3)
    inboxes = {(source, target): empty_like(pages(50, 0)) for source in range(3) for target in range(3)}
    transfers = []
    for source in range(3):
        for target in {0, 1, 2} - {source}:
            transfers.append(ends[source].send(pages(50, 10 * source + target), target, tag=9))
            transfers.append(ends[target].recv(inboxes[source, target], source, tag=9))
    for transfer in transfers:
        transfer.wait(WAIT_S)
    for (source, target), received in inboxes.items():
        if source != target:
            expected = pages(50, 10 * source + target)
            assert all(torch.equal(one, other) for one, other in zip(expected, received, strict=True))


def test_transfers_of_one_direction_arrive_in_their_order():
    first, second = transports(2)
    inboxes = [empty_like(pages(3, 0)) for _ in range(5)]
    transfers = [second.recv(inbox, 0, tag=0) for inbox in inboxes[:1]]
    for number, inbox in enumerate(inboxes):
        transfers.append(first.send(pages(3, 10 * number), 1, tag=number))
        if number:
            transfers.append(second.recv(inbox, 0, tag=number))
    for transfer in transfers:
        transfer.wait(WAIT_S)
    assert [inbox[0].unique().tolist() for inbox in inboxes] == [[0], [10], [20], [30], [40]]


def test_collectives_of_another_group_run_during_a_transfer():
    ends, others = transports(2), gloo_groups(2)
    received = empty_like(pages(200, 0))

    def rank(index: int) -> None:
        transfer = ends[0].send(pages(200, 1), 1, tag=0) if index == 0 else ends[1].recv(received, 0, tag=0)
        for step in range(50):
            total = torch.full((100,), float(step + index))
            others[index].allreduce([total]).wait()
            assert total.unique().tolist() == [2 * step + 1]
        transfer.wait(WAIT_S)

    both(lambda: rank(0), lambda: rank(1))
    assert torch.equal(received[-1], pages(200, 1)[-1])


def test_an_empty_list_is_done_at_once():
    first, _ = transports(2)
    first.send([], 1, tag=0).wait(WAIT_S)


def test_on_done_is_called_at_the_end_of_a_transfer():
    first, second = transports(2)
    ended = [threading.Event(), threading.Event()]
    transfers = [first.send(pages(2, 1), 1, 0, ended[0].set), second.recv(pages(2, 0), 0, 0, ended[1].set)]
    assert all(event.wait(WAIT_S) for event in ended)
    assert all(transfer.done for transfer in transfers)


def test_a_silent_peer_is_a_timeout_that_names_it_and_the_transfer_goes_on():
    first, second = transports(2)
    received = empty_like(pages(2, 0))
    transfer = first.recv(received, 1, tag=0)
    with pytest.raises(PeerTimeout, match=r"rank 1: waited 0\.02 s for 1024 bytes from rank 1 \(0 moved\)"):
        transfer.wait(0.02)
    second.send(pages(2, 4), 0, tag=0)
    transfer.wait(WAIT_S)
    assert torch.equal(received[1], pages(2, 4)[1])


@pytest.mark.parametrize("num_chunks", [0, 1, 3])
def test_a_peer_that_dies_is_an_error_that_names_it(tmp_path, num_chunks):
    into = [torch.zeros(CHUNK_BYTES, dtype=torch.uint8) for _ in range(6)]
    with peer_that_dies_after(str(tmp_path / "store"), num_chunks) as (transport, process):
        transfer = transport.recv(into, 1, tag=5)
        with pytest.raises(TransferError, match=r"rank 1: 50331648 bytes from rank 1 failed") as error:
            transfer.wait(WAIT_S)
        process.join()
        assert error.value.rank == 1
        with pytest.raises(TransferError, match="rank 1"):
            transport.send(into, 1, tag=6).wait(WAIT_S)


def test_an_abandoned_receive_writes_nothing_more_and_blocks_later_transfers_until_it_is_done():
    first, second = transports(2)
    received = empty_like(pages(2, 0))
    ended = threading.Event()
    stuck = first.recv(received, 1, 0, ended.set)
    stuck.abandon()
    with pytest.raises(TransferError, match="rank 1: 1024 bytes from rank 1 was abandoned and has not ended yet"):
        first.send(pages(1, 0), 1, tag=1)
    second.send(pages(2, 4), 0, tag=0).wait(WAIT_S)
    assert ended.wait(WAIT_S)
    assert not torch.cat(received).any()
    transfers = [first.recv(received, 1, tag=1), second.send(pages(2, 5), 0, tag=1)]
    for transfer in transfers:
        transfer.wait(WAIT_S)
    assert torch.equal(received[0], pages(2, 5)[0])


def test_an_abandoned_send_reads_nothing_more_but_lets_the_peer_end():
    first, second = transports(2)
    sent = [torch.full((CHUNK_BYTES,), 7, dtype=torch.uint8) for _ in range(4)]
    transfer = first.send(sent, 1, tag=0)
    transfer.abandon()
    second.recv(empty_like(sent), 0, tag=0).wait(WAIT_S)
    transfer.wait(WAIT_S)


def test_chunks_keep_the_order_hold_their_limit_and_are_aligned():
    tensors = [torch.empty(size, dtype=torch.uint8) for size in (1, 5, CHUNK_BYTES - 40, 30, CHUNK_BYTES + 1, 2)]
    chunks = list(chunks_of(tensors))
    assert [tensor for chunk in chunks for _, tensor in chunk] == tensors
    assert [len(chunk) for chunk in chunks] == [3, 1, 1, 1]
    for chunk in chunks:
        assert all(offset % 16 == 0 for offset, _ in chunk)
        assert len(chunk) == 1 or chunk[-1][0] + chunk[-1][1].nbytes <= CHUNK_BYTES


def test_a_rank_outside_of_the_group_is_a_fault():
    first, _ = transports(2)
    with pytest.raises(AssertionError, match="rank 5 is not in the transport's group of ranks"):
        first.send([], 5, tag=0)
    with pytest.raises(AssertionError, match="3 ranks named for a group of 2"):
        GroupTransport(gloo_groups(2)[0], range(3))
