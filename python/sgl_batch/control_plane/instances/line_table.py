"""Owns the lines that wait for an answer, by key, and the answers that instances keep until they are committed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from sgl_batch.control_plane.instances.messages import Answered, key_of
from sgl_batch.control_plane.instances.pool_line import PoolLine, response_of
from sgl_batch.control_plane.instances.seat import Seat
from sgl_batch.core.answers import LineResponse
from sgl_batch.core.partial_output import PartialOutput
from sgl_batch.errors import EngineError


class LineTable:
    """All lines of a pool, from their call to their answer.

    What instances have from an earlier server is here too: answers that nobody has asked for yet, and lines that they
    compute. A line with the key of one of these gets that answer, or is given to that instance.
    """

    def __init__(self) -> None:
        self._lines: dict[str, PoolLine] = {}
        self._collected: dict[str, tuple[Answered, Seat]] = {}
        self._computing: dict[str, Seat] = {}
        self._keepers: dict[str, tuple[Seat, str]] = {}  # by request id: who keeps the answer, and its key
        # Answers that gone instances kept: keys by request id, and of those that are committed.
        self._left: dict[str, str] = {}
        self._done: set[str] = set()

    def open(self, url: str, body: bytes, partial_output: PartialOutput) -> PoolLine:
        """Return a new line. It is answered already where an instance has its answer from before."""
        occurrence = 0
        while (key := key_of(url, body, occurrence)) in self._lines:
            occurrence += 1
        answer: asyncio.Future[LineResponse] = asyncio.get_running_loop().create_future()
        line = PoolLine(key=key, url=url, body=body, partial_output=partial_output, answer=answer)
        self._lines[key] = line
        collected = self._collected.pop(key, None)
        if collected is not None:
            self._resolve(line, *collected)
        return line

    def close(self, line: PoolLine, *, is_wanted: bool) -> None:
        """Forget a line whose call has ended. `is_wanted`: somebody has taken the answer, and commits it."""
        del self._lines[line.key]
        if not is_wanted and line.answer.done() and not line.answer.cancelled() and line.answer.exception() is None:
            self.acknowledge([line.answer.result().request_id])

    def computing(self, key: str) -> Seat | None:
        """Return the instance that computes a line of this key for an earlier server, once."""
        return self._computing.pop(key, None)

    def found(self, seat: Seat, keys: Iterable[str]) -> None:
        """Note what an instance computes for an earlier server."""
        self._computing.update((key, seat) for key in keys if key not in self._lines)

    def answered(self, seat: Seat, answered: Answered) -> None:
        """Take an answer of an instance."""
        line = self._lines.get(answered.key)
        if line is not None and not line.answer.done():
            self._resolve(line, answered, seat)
        elif line is not None or answered.key in seat.unwanted or answered.key in self._done:
            seat.unwanted.discard(answered.key)
            self._done.discard(answered.key)
            seat.committed.append(answered.key)
        else:
            self._computing.pop(answered.key, None)
            self._collected[answered.key] = (answered, seat)

    def acknowledge(self, request_ids: Iterable[str]) -> None:
        """Let instances forget answers that are committed."""
        for request_id in request_ids:
            found = self._keepers.pop(request_id, None)
            if found is not None:
                seat, key = found
                seat.committed.append(key)
            elif request_id in self._left:
                self._done.add(self._left.pop(request_id))

    def forget(self, seat: Seat) -> None:
        """Forget an instance that has gone. The next incarnation reports again what it kept."""
        self._done.update((*seat.sent, *seat.committed))
        self._left.update((name, key) for name, (one, key) in self._keepers.items() if one is seat)
        self._computing = {key: one for key, one in self._computing.items() if one is not seat}
        self._keepers = {name: one for name, one in self._keepers.items() if one[0] is not seat}

    def forget_old_weights(self) -> None:
        """Let all lines begin anew when they go on elsewhere, and answers from before serve no line any more."""
        for line in self._lines.values():
            line.partial_output.cut(0)
        for key, (_, seat) in self._collected.items():
            seat.committed.append(key)
        self._collected.clear()

    def fail(self, error: EngineError) -> None:
        """Let all lines raise an error."""
        for line in self._lines.values():
            if not line.answer.done():
                line.answer.set_exception(EngineError(str(error), code=error.code))

    def _resolve(self, line: PoolLine, answered: Answered, seat: Seat) -> None:
        self._keepers[answered.request_id] = (seat, answered.key)
        line.answer.set_result(response_of(answered))
