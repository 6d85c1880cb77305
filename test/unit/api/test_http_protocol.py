"""An ambiguous request is refused and its connection closed; half a request has a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from urllib.parse import urlsplit

import pytest
from served_app import served
from starlette.types import Receive, Scope, Send

from sgl_batch.api.http_protocol import StrictProtocol

SECOND = b"GET /second HTTP/1.1\r\nHost: h\r\n\r\n"
HEAD = b"POST /first HTTP/1.1\r\nHost: h\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
AMBIGUOUS = {
    "length and encoding": HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "encoding and length": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
    "encoding of HTTP/1.0": CHUNKED.replace(b"/1.1", b"/1.0") + b"0\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 0\r\nContent-Length: 5\r\n\r\n",
    "two lengths in one": HEAD + b"Content-Length: 0, 5\r\n\r\n",
    "a length with a sign": HEAD + b"Content-Length: +0\r\n\r\n",
    "a negative length": HEAD + b"Content-Length: -1\r\n\r\n",
    "a length that is none": HEAD + b"Content-Length: 0x0\r\n\r\n",
    "two encodings": HEAD + b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "an unknown encoding": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n",
    "an encoding behind another": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "LF in the head": b"POST /first HTTP/1.1\r\nHost: h\nContent-Length: 0\r\n\r\n",
    "LF after the request line": b"POST /first HTTP/1.1\nHost: h\r\n\r\n",
    "LF at the end of the head": b"POST /first HTTP/1.1\r\nHost: h\r\n\n",
    "CR alone": b"POST /first HTTP/1.1\r\nHost: h\rX: y\r\n\r\n",
    "a folded line": HEAD + b"X: 1\r\n Transfer-Encoding: chunked\r\n\r\n",
    "a folded line of tabs": HEAD + b"X: 1\r\n\tContent-Length: 5\r\n\r\n",
    "a space before the colon": HEAD + b"Content-Length : 0\r\n\r\n",
    "a space before the name": b"POST /first HTTP/1.1\r\n Host: h\r\n\r\n",
    "a NUL": HEAD + b"Content-Length: 0\0\r\n\r\n",
    "two hosts": HEAD + b"Host: other\r\n\r\n",
    "no host": b"POST /first HTTP/1.1\r\n\r\n",
    "a chunk of a size that is none": CHUNKED + b"0x1\r\na\r\n0\r\n\r\n",
    "a chunk of a negative size": CHUNKED + b"-1\r\n\r\n",
    "a chunk of no size": CHUNKED + b"\r\na\r\n0\r\n\r\n",
    "a chunk of a great size": CHUNKED + b"F" * 21 + b"\r\n",
    "a chunk longer than its size": CHUNKED + b"1\r\nab\r\n0\r\n\r\n",
    "a chunk's size before LF": CHUNKED + b"1\na\r\n0\r\n\r\n",
    "a chunk's extension before LF": CHUNKED + b"1;x\na\r\n0\r\n\r\n",
    "a chunk before LF": CHUNKED + b"1\r\na\n0\r\n\r\n",
    "an end of chunks before LF": CHUNKED + b"0\r\n\n",
    "a trailer before LF": CHUNKED + b"0\r\nX: y\n\r\n",
    "a folded trailer": CHUNKED + b"0\r\nX: y\r\n z\r\n\r\n",
}
PLAIN = {
    "a length": HEAD + b"Content-Length: 3\r\n\r\nabc",
    "chunks": CHUNKED + b"1\r\na\r\n2;x=y\r\nbc\r\n0\r\nX: y\r\n\r\n",
    "no body": HEAD + b"\r\n",
}


class Echo:
    """An app that answers a request with its path and body, and keeps the requests."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.gone = asyncio.Event()
        self.begins_early = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        body = b""
        if self.begins_early:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.gone.set()
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        answer = scope["path"].encode() + b"=" + body + b"."
        if not self.begins_early:
            headers = [(b"content-length", str(len(answer)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def run(scenario: Callable[[Echo, Callable[[], Awaitable[Client]]], Awaitable[None]]) -> None:
    async def bounded() -> None:
        app = Echo()
        async with served(app) as url:
            address = urlsplit(url)

            async def connect() -> Client:
                return await asyncio.open_connection(address.hostname, address.port)

            await asyncio.wait_for(scenario(app, connect), 20)

    asyncio.run(bounded())


async def answered(client: Client, data: bytes) -> bytes:
    """Return all bytes until the server closes the connection."""
    client[1].write(data)
    everything = await client[0].read()
    client[1].close()
    return everything


def test_a_request_that_can_be_read_in_two_ways_is_refused_with_all_that_follows() -> None:
    async def scenario(app: Echo, connect: Callable[[], Awaitable[Client]]) -> None:
        for what, request in AMBIGUOUS.items():
            app.paths.clear()
            answer = await answered(await connect(), request + SECOND)
            assert answer.startswith(b"HTTP/1.1 400 "), (what, answer)
            assert b'"invalid_http"' in answer, what
            assert answer.count(b"HTTP/1.1") == 1, (what, answer)
            assert "/second" not in app.paths, what

    run(scenario)


def test_the_reason_of_a_refusal_is_in_the_answer() -> None:
    async def scenario(app: Echo, connect: Callable[[], Awaitable[Client]]) -> None:
        answer = await answered(await connect(), AMBIGUOUS["length and encoding"])
        assert b"both Content-Length and Transfer-Encoding are given" in answer
        assert app.paths == []

    run(scenario)


def test_plain_requests_are_answered_one_after_the_other() -> None:
    async def scenario(app: Echo, connect: Callable[[], Awaitable[Client]]) -> None:
        for what, request in PLAIN.items():
            app.paths.clear()
            last = SECOND.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
            answer = await answered(await connect(), request + SECOND + last)
            assert answer.count(b"HTTP/1.1 200") == 3, (what, answer)
            assert app.paths == ["/first", "/second", "/second"]
            assert (b"/first=abc." if what != "no body" else b"/first=.") in answer

    run(scenario)


def test_a_fault_in_the_body_ends_an_answer_that_has_begun() -> None:
    async def scenario(app: Echo, connect: Callable[[], Awaitable[Client]]) -> None:
        app.begins_early = True
        client = await connect()
        client[1].write(CHUNKED)
        assert (await client[0].readline()).startswith(b"HTTP/1.1 200")
        assert b"400" not in await answered(client, b"zz\r\n" + SECOND)
        await app.gone.wait()
        assert app.paths == ["/first"]

    run(scenario)


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"", b""),
        (HEAD, b"408"),
        (b"GET ", b"408"),
        (HEAD + b"Content-Length: 9\r\n\r\nabc", b"408"),
        (CHUNKED + b"3\r\nabc\r\n", b"408"),
        (SECOND + HEAD, b"408"),
    ],
)
def test_half_a_request_is_given_up(sent: bytes, words: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StrictProtocol, "head_within_s", 0.1)
    monkeypatch.setattr(StrictProtocol, "body_pause_s", 0.1)

    async def scenario(app: Echo, connect: Callable[[], Awaitable[Client]]) -> None:
        answer = await answered(await connect(), sent)
        assert words in answer
        assert bool(answer) == bool(words)
        if b"\r\n\r\n" in sent and sent.startswith(b"POST"):
            await app.gone.wait()

    run(scenario)


def test_a_head_that_comes_byte_by_byte_is_given_up_and_a_body_that_does_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StrictProtocol, "head_within_s", 0.3)
    monkeypatch.setattr(StrictProtocol, "body_pause_s", 0.3)

    async def received(reader: asyncio.StreamReader) -> bytes:
        """All that arrives until the connection ends, or is reset because data came after the answer."""
        found = b""
        with suppress(ConnectionResetError):
            while part := await reader.read(1 << 16):
                found += part
        return found

    async def drip(client: Client, data: bytes) -> bytes:
        """A little of the data at a time: pauses shorter than the limits, and longer than they are all together."""
        everything = asyncio.ensure_future(received(client[0]))
        for begin in range(0, len(data), 4):
            if not everything.done():
                client[1].write(data[begin : begin + 4])
                await asyncio.sleep(0.05)
        found = await everything
        client[1].close()
        return found

    async def scenario(app: Echo, connect: Callable[[], Awaitable[Client]]) -> None:
        with_body = await connect()
        with_body[1].write(HEAD + b"Connection: close\r\nContent-Length: 60\r\n\r\n")
        head, body = await asyncio.gather(
            drip(await connect(), HEAD + b"X: y\r\n" * 10),
            drip(with_body, b"x" * 60),
        )
        assert b"408" in head
        assert b"/first=" + b"x" * 60 in body

    run(scenario)


def test_a_client_that_waits_for_the_server_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StrictProtocol, "body_pause_s", 0.05)
    reads = asyncio.Event()

    async def late(scope: Scope, receive: Receive, send: Send) -> None:
        await reads.wait()
        size, more = 0, True
        while more:
            message = await receive()
            assert message["type"] == "http.request"
            size, more = size + len(message["body"]), message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": f"{size} bytes".encode()})

    async def scenario() -> None:
        async with served(late) as url:
            address = urlsplit(url)
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            expecting, expecting_writer = await asyncio.open_connection(address.hostname, address.port)
            expecting_writer.write(HEAD + b"Expect: 100-continue\r\nContent-Length: 1\r\n\r\n")
            writer.write(HEAD + b"Content-Length: 3000000\r\n\r\n" + b"x" * 3_000_000)
            await asyncio.sleep(0.3)
            reads.set()
            assert b"3000000 bytes" in await reader.read()
            assert (await expecting.readline()).startswith(b"HTTP/1.1 100")
            expecting_writer.write(b"x")
            assert b"1 bytes" in await expecting.read()
            expecting_writer.close()
            writer.close()

    asyncio.run(asyncio.wait_for(scenario(), 20))
