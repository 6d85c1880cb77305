"""Owns the control channel over ZeroMQ. Its users give the types of messages, and distribute the addresses.

Every rank binds one PULL socket and connects one PUSH socket to each peer, so that a pair of ranks has one connection
in each direction. The sockets are AF_UNIX ones: the permissions of their directory say which users can reach them.

A message is two frames of MessagePack: the envelope (run, sender's rank, running number) and the message itself. It is
decoded into the types given at construction and no others.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from sgl_batch.distributed.rank_errors import BadMessage, PeerLost, PeerTimeout
from sgl_batch.errors import ConfigError

M = TypeVar("M", bound=msgspec.Struct)

# ZeroMQ's thread reads a peer's last messages and the end of its other connection in any order. Messages that are
# still in the kernel's buffers when the end is seen get this long to be read.
_DRAIN_S = 0.05
_LINGER_MS = 2000
# CLOSED: no process listens at the peer's address.
_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class _Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    run_id: str
    source: int
    number: int


class ZmqChannel(Generic[M]):
    """A `Channel` between processes of one machine (see channel.py for the contract).

    `messages` is the union of tagged msgspec structs that may be sent. `run_id` keeps two runs on one machine apart.
    `path`: the file of this rank's socket, in a directory that only this user can access.
    The caller gives `endpoint` to the other ranks, and their endpoints to `connect`. The kernel closes the connections
    of a process that dies, so that it is lost at once. A process that is merely stopped keeps them, and times out.
    """

    def __init__(
        self,
        *,
        rank: int,
        messages: Any,
        run_id: str,
        path: Path,
        send_timeout_s: float = 10.0,
        max_message_bytes: int = 256 << 20,
    ) -> None:
        self.rank = rank
        self._run_id, self._send_timeout_s, self._max_message_bytes = run_id, send_timeout_s, max_message_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(messages)
        self._envelope_decoder = msgspec.msgpack.Decoder(_Envelope)
        self._context = zmq.Context()
        self._inlet = self._new_socket(zmq.PULL)
        try:
            self._inlet.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"the socket {path} cannot be made ({error}): set TMPDIR to another directory") from error
        self._outlets: dict[int, zmq.Socket[bytes]] = {}
        self._monitors: dict[int, zmq.Socket[bytes]] = {}
        self._sent: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        self._inbox: dict[int, deque[M | BadMessage]] = {}
        self._gone_since: dict[int, float] = {}
        self._shut_out: set[int] = set()
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)
        self._wakened.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._inlet, zmq.POLLIN)
        self._poller.register(self._wakened, zmq.POLLIN)

    def _new_socket(self, kind: int) -> zmq.Socket[bytes]:
        new = self._context.socket(kind)
        new.setsockopt(zmq.LINGER, _LINGER_MS)
        new.setsockopt(zmq.MAXMSGSIZE, self._max_message_bytes)
        return new

    @property
    def endpoint(self) -> str:
        """The address for the other ranks' `connect`."""
        return self._inlet.getsockopt_string(zmq.LAST_ENDPOINT)

    def connect(self, endpoints: Mapping[int, str]) -> None:
        """Connect to every rank of `endpoints` but this one. All of them must have bound their sockets."""
        for peer in sorted(set(endpoints) - {self.rank}):
            assert peer not in self._outlets, f"rank {self.rank} is connected to rank {peer} already"
            outlet = self._new_socket(zmq.PUSH)
            outlet.setsockopt(zmq.IMMEDIATE, 1)  # send() waits for a connection; no message is queued without one
            outlet.setsockopt(zmq.RECONNECT_IVL, -1)  # a peer that was gone may have missed messages: it stays gone
            self._monitors[peer] = outlet.get_monitor_socket(_GONE)
            self._poller.register(self._monitors[peer], zmq.POLLIN)
            outlet.connect(endpoints[peer])
            self._outlets[peer] = outlet
            self._sent[peer] = self._taken[peer] = 0
            self._inbox[peer] = deque()

    def send(self, peer: int, message: M) -> None:
        """See Channel.send. Wait for the connection, or for room in the queue, up to `send_timeout_s`."""
        self._check_peers([peer])
        what = f"it to take in {type(message).__name__}"
        body = self._encoder.encode(message)
        assert len(body) <= self._max_message_bytes, (
            f"{type(message).__name__} for rank {peer} has {len(body)} bytes, limit {self._max_message_bytes}; "
            "send less at once or raise max_message_bytes"
        )
        begun = time.monotonic()
        self._watch()
        while peer not in self._gone_since:
            left = begun + self._send_timeout_s - time.monotonic()
            if self._writable(peer, max(left, 0)) and self._hand_over(peer, body):
                return
            if left <= 0:
                raise PeerTimeout([peer], awaiting=what, seconds=self._send_timeout_s)
            self._watch()
        raise PeerLost(peer, awaiting=what, seconds=time.monotonic() - begun)

    def _hand_over(self, peer: int, body: bytes) -> bool:
        """Return whether the socket took the message. It does not where the connection ended after it was writable."""
        envelope = _Envelope(self._run_id, self.rank, self._sent[peer])
        try:
            self._outlets[peer].send_multipart([self._encoder.encode(envelope), body], zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._sent[peer] += 1
        return True

    def _writable(self, peer: int, timeout_s: float) -> bool:
        outlet = self._outlets[peer]
        poller = zmq.Poller()
        poller.register(outlet, zmq.POLLOUT)
        poller.register(self._monitors[peer], zmq.POLLIN)
        return outlet in dict(poller.poll(int(timeout_s * 1000)))

    def recv(self, peers: Collection[int], *, timeout_s: float, awaiting: str) -> tuple[int, M] | None:
        """See Channel.recv."""
        self._check_peers(peers)
        begun = time.monotonic()
        while True:
            self._watch()
            self._take_in()
            for peer in sorted(peers):
                if self._inbox[peer]:
                    message = self._inbox[peer].popleft()
                    if isinstance(message, BadMessage):
                        raise message
                    return peer, message
            now = time.monotonic()
            wait = begun + timeout_s - now
            for peer in sorted(self._gone_since.keys() & set(peers)):
                drained = self._gone_since[peer] + _DRAIN_S - now
                if drained <= 0:
                    self._shut_out.add(peer)
                    raise PeerLost(peer, awaiting=awaiting, seconds=now - begun)
                wait = min(wait, drained)
            if self._was_woken():
                return None
            if now >= begun + timeout_s:
                raise PeerTimeout(peers, awaiting=awaiting, seconds=timeout_s)
            self._poller.poll(int(max(wait, 0) * 1000) + 1)

    def wake(self) -> None:
        """See Channel.wake."""
        with contextlib.suppress(BlockingIOError):  # the buffer is full of wakes: one more changes nothing
            self._waker.send(b"\0")

    def _was_woken(self) -> bool:
        try:
            return bool(self._wakened.recv(4096))
        except BlockingIOError:
            return False

    def _watch(self) -> None:
        """Note the peers whose connection has ended."""
        for peer, monitor in self._monitors.items():
            while monitor.poll(0):
                recv_monitor_message(monitor)
                self._gone_since.setdefault(peer, time.monotonic())

    def _take_in(self) -> None:
        """Put all arrived messages into the inboxes. Raises BadMessage for one that no connected peer has sent."""
        while self._inlet.poll(0):
            frames = self._inlet.recv_multipart()
            envelope = self._envelope_of(frames)
            if envelope.source not in self._shut_out:
                self._inbox[envelope.source].append(self._decoded(envelope, frames[1]))

    def _decoded(self, envelope: _Envelope, body: bytes) -> M | BadMessage:
        source, number = envelope.source, envelope.number
        expected, self._taken[source] = self._taken[source], number + 1
        if number != expected:
            return BadMessage(source, f"rank {source} sent message number {number} where {expected} was next")
        try:
            message: M = self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return BadMessage(source, f"message number {number} of rank {source} ({len(body)} bytes): {error}")
        return message

    def _envelope_of(self, frames: list[bytes]) -> _Envelope:
        """Return the envelope of these frames. Raises BadMessage where its sender is no connected peer."""
        if len(frames) != 2:
            raise BadMessage(None, f"a message of {len(frames)} frames came from an unknown sender; a message has 2")
        try:
            envelope = self._envelope_decoder.decode(frames[0])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadMessage(None, f"a message came in whose envelope does not name its sender: {error}") from error
        if envelope.run_id != self._run_id or envelope.source not in self._inbox:
            raise BadMessage(
                None,
                f"a message came from rank {envelope.source} of run {envelope.run_id!r}; this is rank {self.rank} of "
                f"run {self._run_id!r}, connected to ranks {sorted(self._inbox)}: the ranks' endpoints are mixed up",
            )
        return envelope

    def _check_peers(self, peers: Collection[int]) -> None:
        assert not self._context.closed, f"the channel of rank {self.rank} is closed"
        unknown = sorted(set(peers) - self._outlets.keys())
        assert peers, "no rank is named to receive from"
        assert not unknown, f"rank {self.rank} is not connected to ranks {unknown}"

    def close(self) -> None:
        """Close the channel; messages that were sent get two more seconds to leave. Idempotent. Peers see PeerLost."""
        if self._context.closed:
            return
        for outlet in self._outlets.values():
            outlet.disable_monitor()
        for open_socket in (*self._monitors.values(), *self._outlets.values(), self._inlet):
            open_socket.close()
        self._context.term()
        self._waker.close()
        self._wakened.close()

    def __enter__(self) -> ZmqChannel[M]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
