"""Messages arrive typed and in order. A silent, dead or faulty peer is an error that names it, and never a hang."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
from channel_process import Number, other_process

from sgl_batch.distributed.rank_errors import BadMessage, PeerLost, PeerTimeout
from sgl_batch.distributed.zmq_channel import ZmqChannel
from sgl_batch.errors import ConfigError

SOON_S = 10.0  # for events that are immediate, on a busy machine too


class Text(msgspec.Struct, tag="text"):
    words: list[str]


class Unheard(msgspec.Struct, tag="unheard"):
    value: int = 0


Talk = Number | Text


@contextmanager
def open_channel(rank: int, **options) -> Iterator[ZmqChannel[Talk]]:
    with (
        tempfile.TemporaryDirectory() as directory,
        ZmqChannel(rank=rank, messages=Talk, run_id="run", path=Path(directory) / str(rank), **options) as channel,
    ):
        yield channel


@contextmanager
def connected(num_ranks: int, **options) -> Iterator[list[ZmqChannel[Talk]]]:
    with ExitStack() as stack:
        channels = [stack.enter_context(open_channel(rank, **options)) for rank in range(num_ranks)]
        endpoints = {channel.rank: channel.endpoint for channel in channels}
        for channel in channels:
            channel.connect(endpoints)
        yield channels


def take(channel: ZmqChannel[Talk], *peers: int) -> tuple[int, Talk] | None:
    return channel.recv(peers, timeout_s=SOON_S, awaiting="a message")


@contextmanager
def stranger(channel: ZmqChannel[Talk]) -> Iterator[zmq.Socket[bytes]]:
    """A bare socket that sends the frames of a test."""
    context = zmq.Context()
    outlet = context.socket(zmq.PUSH)
    outlet.connect(channel.endpoint)
    try:
        yield outlet
    finally:
        context.destroy(linger=1000)


def test_messages_of_each_peer_arrive_in_order():
    with connected(3) as (first, second, third):
        for value in range(200):
            second.send(0, Number(value=value))
            third.send(0, Text(words=[str(value)]))
        taken = [take(first, 1, 2) for _ in range(400)]
    assert [message for peer, message in taken if peer == 1] == [Number(value=value) for value in range(200)]
    assert [message for peer, message in taken if peer == 2] == [Text(words=[str(value)]) for value in range(200)]


def test_messages_of_other_peers_are_kept_for_later_calls():
    with connected(3) as (first, second, third):
        second.send(0, Number(value=1))
        third.send(0, Number(value=2))
        assert take(first, 2) == (2, Number(value=2))
        assert take(first, 1) == (1, Number(value=1))


def test_a_timeout_names_the_rank_what_was_awaited_and_how_long():
    with (
        connected(2) as (first, _),
        pytest.raises(PeerTimeout, match=r"rank 1: waited 0\.02 s for Accept of batch 3") as e,
    ):
        first.recv([1], timeout_s=0.02, awaiting="Accept of batch 3")
    assert e.value.rank == 1


def test_a_timeout_on_several_ranks_names_them_all():
    with connected(3) as (first, *_), pytest.raises(PeerTimeout, match="ranks 1, 2: waited"):
        first.recv([2, 1], timeout_s=0.02, awaiting="anything")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (msgspec.msgpack.encode(Unheard()), "unheard"),
        (msgspec.msgpack.encode({"type": "number", "value": "x"}), "Expected `int`"),
        (b"\xc1\xff\x00", "MessagePack"),
        (b"", "truncated"),
        (b"\x81\xa4type\xa6n\xffmber", "utf-8"),
    ],
)
def test_a_message_that_cannot_be_decoded_is_an_error_and_the_channel_goes_on(body, reason):
    with connected(2) as (first, second), stranger(first) as outlet:
        outlet.send_multipart([msgspec.msgpack.encode(["run", 1, 0]), body])
        with pytest.raises(BadMessage, match=f"number 0 of rank 1 .*{reason}") as error:
            take(first, 1)
        assert error.value.rank == 1
        second._sent[0] = 1  # the stranger has sent a message as rank 1
        second.send(0, Number(value=5))
        assert take(first, 1) == (1, Number(value=5))


@pytest.mark.parametrize(
    "frames",
    [
        [b"one frame"],
        [b"not msgpack \xc1", b""],
        [msgspec.msgpack.encode(["run", 1]), b""],
        [msgspec.msgpack.encode(["run", 9, 0]), msgspec.msgpack.encode(Number(value=1))],
        [msgspec.msgpack.encode(["another run", 1, 0]), msgspec.msgpack.encode(Number(value=1))],
        [b"", b"", b""],
    ],
)
def test_a_message_of_an_unknown_sender_is_an_error_without_a_rank_and_the_channel_goes_on(frames):
    with connected(2) as (first, second), stranger(first) as outlet:
        outlet.send_multipart(frames)
        with pytest.raises(BadMessage) as error:
            take(first, 1)
        assert error.value.rank is None
        second.send(0, Number(value=5))
        assert take(first, 1) == (1, Number(value=5))


def test_a_missing_message_is_an_error():
    with connected(2) as (first, second):
        second._sent[0] = 3
        second.send(0, Number(value=1))
        with pytest.raises(BadMessage, match="rank 1 sent message number 3 where 0 was next"):
            take(first, 1)


def test_wake_ends_a_wait_from_another_thread():
    with connected(2) as (first, _):
        timer = threading.Timer(0.01, first.wake)
        timer.start()
        assert take(first, 1) is None
        timer.join()


def test_many_wakes_end_one_wait_and_never_block():
    with connected(2) as (first, second):
        for _ in range(100_000):
            first.wake()
        while take(first, 1) is None and first._was_woken():
            pass
        second.send(0, Number(value=1))
        received = [take(first, 1) for _ in range(1)]
    assert (1, Number(value=1)) in received


def test_messages_sent_before_a_close_are_received_before_the_loss():
    with connected(2) as (first, second):
        for value in range(50):
            second.send(0, Number(value=value))
        second.close()
        assert [take(first, 1) for _ in range(50)] == [(1, Number(value=value)) for value in range(50)]
        with pytest.raises(PeerLost, match="rank 1 closed its connection"):
            take(first, 1)
        with pytest.raises(PeerLost, match=r"rank 1 .* for it to take in Number"):
            first.send(1, Number(value=1))


def test_the_loss_of_one_peer_leaves_the_others_alone():
    with connected(3) as (first, second, third):
        second.close()
        with pytest.raises(PeerLost) as error:
            take(first, 1, 2)
        assert error.value.rank == 1
        third.send(0, Number(value=1))
        assert take(first, 2) == (2, Number(value=1))
        first.send(2, Number(value=2))
        assert take(third, 0) == (0, Number(value=2))


def test_no_message_of_a_lost_peer_is_received():
    with connected(2) as (first, second), stranger(first) as outlet:
        second.close()
        with pytest.raises(PeerLost):
            take(first, 1)
        outlet.send_multipart([msgspec.msgpack.encode(["run", 1, 0]), msgspec.msgpack.encode(Number(value=1))])
        with pytest.raises(PeerLost):
            first.recv([1], timeout_s=0.2, awaiting="nothing")


def test_an_address_without_a_listener_is_a_lost_peer():
    with open_channel(1) as gone:
        endpoint = gone.endpoint
    with open_channel(0) as channel:
        channel.connect({1: endpoint})
        with pytest.raises(PeerLost, match="rank 1"):
            channel.send(1, Number(value=1))


def test_a_connection_that_ends_just_before_a_message_is_handed_over_is_a_lost_peer(monkeypatch):
    with connected(2) as (first, second):

        def writable_a_moment_ago(peer: int, timeout_s: float) -> bool:
            second.close()
            return bool(first._monitors[peer].poll(SOON_S * 1000))

        monkeypatch.setattr(first, "_writable", writable_a_moment_ago)
        with pytest.raises(PeerLost, match=r"rank 1 .* for it to take in Number"):
            first.send(1, Number(value=1))


def test_a_peer_that_takes_nothing_in_is_a_timeout():
    full = Text(words=["x" * 100] * 100)

    def send_until_full(channel: ZmqChannel[Talk]) -> None:
        for _ in range(10_000):
            channel.send(1, full)

    with connected(2, send_timeout_s=0.05) as (first, _), pytest.raises(PeerTimeout, match=r"rank 1.* take in Text"):
        send_until_full(first)


def test_a_socket_with_too_long_a_name_is_refused_with_a_remedy(tmp_path):
    with pytest.raises(ConfigError, match="set TMPDIR to another directory"):
        ZmqChannel(rank=0, messages=Talk, run_id="run", path=tmp_path / ("x" * 200))


def test_close_may_be_called_again():
    with connected(2) as (first, _):
        first.close()
        first.close()


def test_a_killed_peer_is_lost_at_once():
    with open_channel(0) as channel, other_process(channel.endpoint) as (process, endpoint):
        channel.connect({1: endpoint})
        assert take(channel, 1) == (1, Number(value=1))
        process.kill()
        begun = time.monotonic()
        with pytest.raises(PeerLost, match=r"rank 1 closed its connection .* waiting for Commit"):
            channel.recv([1], timeout_s=60, awaiting="Commit")
        assert time.monotonic() - begun < SOON_S


def test_a_stopped_peer_is_not_lost():
    with open_channel(0) as channel, other_process(channel.endpoint) as (process, endpoint):
        channel.connect({1: endpoint})
        assert take(channel, 1) == (1, Number(value=1))
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(PeerTimeout):
            channel.recv([1], timeout_s=0.3, awaiting="Commit")
