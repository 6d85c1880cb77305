"""Owns the messages between the server's process (the front) and the engine's, and their form in a stream of bytes.

A frame is its length (4 bytes, big endian) and one MessagePack message, which is decoded only into the types given.
Bodies of requests and answers are JSON in it: JSON has numbers of any size.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Generic, TypeVar

import msgspec

from sgl_batch.core.answers import EngineStats
from sgl_batch.core.plan_rates import PlanRates
from sgl_batch.errors import SglBatchError

# One frame holds one request or answer: a line's limit is far lower, and log probabilities of a long answer fit.
MAX_FRAME_BYTES = 1 << 30
_LENGTH_BYTES = 4
# How long the other side may take to end the connection after a last message.
_LAST_WITHIN_S = 5.0


class FrameError(SglBatchError):
    """The bytes are not a message of ours. Nothing that follows them in the stream can be trusted."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine answers from now on, under these names of the model.

    `forward` names its forward pass. `plan_rates`: what its plan predicts; None without a profile.
    """

    served_model_names: tuple[str, ...]
    forward: str = ""
    plan_rates: PlanRates | None = None


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine cannot start or is dead, and its process ends. `code`: that of the EngineError."""

    message: str
    code: str | None


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to the request `number`."""

    number: int
    status_code: int
    request_id: str
    body: bytes


class Counted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The statistics for the request `number`."""

    number: int
    stats: EngineStats


class PartialOutputUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of the partial output of request `number`: `tokens`, packed, from position `start` on."""

    number: int
    start: int
    tokens: bytes


class PartialOutputUpdates(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What unanswered requests have generated since the last message of this type."""

    updates: tuple[PartialOutputUpdate, ...]


class Respond(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer this request. Its answer continues `partial_output` (packed), which an earlier engine has generated."""

    number: int
    url: str
    body: bytes
    partial_output: bytes


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer `number` is no longer wanted."""

    number: int


class Count(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Send the statistics."""

    number: int


FromEngine = Ready | Failed | Answer | Counted | PartialOutputUpdates
FromFront = Respond | Cancel | Count
M = TypeVar("M")


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(dict[str, Any])


def pack_body(body: Mapping[str, object]) -> bytes:
    """Return the bytes of the body of a request or an answer. Equal bodies have equal bytes."""
    try:
        data = _ENCODER.encode(body)
    except UnicodeEncodeError:  # half of a surrogate pair, which UTF-8 has no bytes for
        return _pack_any(body)
    # A number that is not finite is null there too.
    return _pack_any(body) if b"null" in data else data


def _pack_any(body: Mapping[str, object]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode("ascii")


def unpack_body(data: bytes) -> dict[str, Any]:
    """Return the body of a request or an answer."""
    try:
        return _DECODER.decode(data)
    except msgspec.MsgspecError:  # what `_pack_any` writes, and JSON does not have
        body: dict[str, Any] = json.loads(data)
        return body


def write_frame(message: msgspec.Struct) -> bytes:
    """Return the frame of a message. Raises FrameError for a message that is too long."""
    data = msgspec.msgpack.encode(message)
    if len(data) > MAX_FRAME_BYTES:
        raise FrameError(f"a message has {len(data):,} bytes; at most {MAX_FRAME_BYTES:,} are sent")
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


class Frames(Generic[M]):
    """Messages over one connection. It reads messages of the type `incoming`, and writes any."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, incoming: Any) -> None:
        self._reader, self._writer = reader, writer
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(incoming)

    async def read(self) -> M | None:
        """Return the next message, or None when the other side has ended. Raises FrameError."""
        try:
            length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"a frame says it has {length:,} bytes; at most {MAX_FRAME_BYTES:,} are taken")
            data = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        try:
            return self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise FrameError(f"a frame of {length:,} bytes is not a message of ours: {error}") from error

    def write(self, message: msgspec.Struct) -> None:
        """Put a message into the buffer, or drop it where the connection has ended. Raises FrameError."""
        frame = write_frame(message)
        if not self._writer.is_closing():
            self._writer.write(frame)

    async def send(self, message: msgspec.Struct) -> None:
        """Write a message, and wait while the other side is slow to read."""
        self.write(message)
        try:
            await self._writer.drain()
        except ConnectionError:
            return  # the reader notices the end

    async def send_last(self, message: msgspec.Struct) -> None:
        """Write a last message, and wait until the other side has ended the connection, at most 5 s.

        A process that ends while messages to it are under way resets its connection: what the other side has not read
        by then may be lost.
        """
        await self.send(message)
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(_LAST_WITHIN_S):
                while await self._reader.read(1 << 16):
                    pass

    def close(self) -> None:
        """End the connection."""
        self._writer.close()
