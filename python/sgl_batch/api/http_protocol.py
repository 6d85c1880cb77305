"""Owns how connections are read: every byte has one meaning, and no client that sends nothing is waited for.

A program before this server (a proxy, a load balancer) may read an ambiguous request differently, and take the end of
one request for the beginning of the next. Ambiguous requests are refused, and their connections closed.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer
from h11._util import LocalProtocolError
from uvicorn.protocols.http.h11_impl import H11Protocol

from sgl_batch.api.errors import error_body

_LINES_END = re.compile(rb"\n\r?\n")
_BARE_LF = re.compile(rb"(?<!\r)\n")
_FOLD = re.compile(rb"\n[ \t]")
_CODES = {400: "invalid_http", 408: "request_timeout"}


class _StrictLines(ReceiveBuffer):
    """h11's buffer, which here refuses lines that end in LF alone or continue on the next line."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Return the lines of a head or of trailers, once they are whole."""
        if self._data[:2] != b"\r\n":  # an empty line, which ends the head
            end = _LINES_END.search(self._data, self._multiple_lines_search)
            lines = self._data[: end.end()] if end else self._data[:1]
            if _BARE_LF.search(lines):
                raise LocalProtocolError("a line ends in LF alone, and not in CRLF")
            if _FOLD.search(lines):
                raise LocalProtocolError("a line of the head begins with a space")
        return super().maybe_extract_lines()


class _StrictConnection(h11.Connection):
    """h11's reading of one connection. `fault` says what was wrong in it."""

    def __init__(self, max_incomplete_event_size: int) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size)
        self._receive_buffer = _StrictLines()
        self.fault = ""

    @property
    def holds_bytes(self) -> bool:
        """Whether bytes of the client are not read yet."""
        return bool(self._receive_buffer)

    def next_event(self) -> Any:
        """Return h11's next event. Raises RemoteProtocolError for what h11 or this server refuses."""
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                _check_framing(event)
        except h11.RemoteProtocolError as error:
            self.fault = str(error)
            raise
        return event


def _check_framing(request: h11.Request) -> None:
    """Check that the end of a request's body is unambiguous. Raises RemoteProtocolError."""
    names = [name for name, _ in request.headers]
    if b"transfer-encoding" not in names:
        return
    if b"content-length" in names:
        raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding are given")
    if request.http_version < b"1.1":
        raise h11.RemoteProtocolError("HTTP/1.0 has no Transfer-Encoding")


class StrictProtocol(H11Protocol):
    """Uvicorn's HTTP/1.1 over a strict reading, with time limits for requests that a client leaves half sent.

    `head_within_s`: how long the head of a request may take, from the start of the connection or from its own first
    byte. `body_pause_s`: how long a body that is waited for may pause; a body that keeps coming is never cut off.
    Between requests, uvicorn's own limit applies.
    """

    head_within_s = 20.0
    body_pause_s = 60.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn: _StrictConnection = _StrictConnection(self.conn._max_incomplete_event_size)
        self._head_since: float | None = None
        self._last_data = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_since = self.loop.time()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._last_data = self.loop.time()
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that cannot be read, with the reason, and close."""
        self._refuse(400, f"{msg} {self.conn.fault}.")

    def _watch(self) -> None:
        """Set the timer for the deadline of what is awaited now."""
        if self.transport.is_closing():
            self._unwatch()
            return
        self._note_head()
        deadline = self._deadline()
        if deadline is None:
            self._unwatch()
        elif self._timer is None:
            self._timer = self.loop.call_at(deadline, self._look)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _note_head(self) -> None:
        """Note when a head began: with its first byte, and the first head with the connection."""
        if self.conn.their_state is not h11.IDLE:
            self._head_since = None
        elif self._head_since is None and self.conn.holds_bytes:
            self._head_since = self.loop.time()

    def _deadline(self) -> float | None:
        if self.conn.their_state is h11.IDLE:
            return None if self._head_since is None else self._head_since + self.head_within_s
        if self.conn.their_state is not h11.SEND_BODY or self.cycle.response_started:
            return None
        return self._last_data + self.body_pause_s

    def _look(self) -> None:
        self._timer = None
        deadline = self._deadline()
        if deadline is None:
            return
        if self._waits_for_us():
            self._last_data = self.loop.time()
        elif deadline <= self.loop.time():
            self._refuse(408, "The request is incomplete, and the rest of it has not come in time.")
            return
        self._watch()

    def _waits_for_us(self) -> bool:
        """Return whether the client waits for us: reading is paused, or it waits for the answer 100 Continue."""
        in_body = self.conn.their_state is h11.SEND_BODY
        return in_body and (self.flow.read_paused or self.cycle.waiting_for_100_continue)

    def _refuse(self, status: int, message: str) -> None:
        """Answer if there is a request and an answer is still possible, then close."""
        self._unwatch()
        waiting = self.conn.their_state is h11.IDLE and not self.conn.holds_bytes
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not waiting:
            body = json.dumps(error_body(status, message, code=_CODES[status])).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()
