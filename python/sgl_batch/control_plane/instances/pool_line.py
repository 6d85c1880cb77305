"""Owns a line that a pool of instances has to answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from sgl_batch.control_plane.instances.messages import Answered, Line
from sgl_batch.core.answers import LineResponse
from sgl_batch.core.partial_output import PartialOutput
from sgl_batch.engine.line_frames import unpack_body


@dataclass(slots=True, eq=False)
class PoolLine:
    """A line from `respond` to its answer. `partial_output` is the caller's, and grows as instances report tokens.

    `has_moved`: whether it was taken from an instance that had begun it; that happens once at most.
    `was_spared`: whether an engine that had it died, and it was not suspected because it seemed not begun.
    """

    key: str
    url: str
    body: bytes
    partial_output: PartialOutput
    answer: asyncio.Future[LineResponse]
    has_moved: bool = False
    was_spared: bool = False

    def message(self) -> Line:
        """Return the line as an instance gets it."""
        return Line(self.key, self.url, self.body, self.partial_output.pack())


def response_of(answered: Answered) -> LineResponse:
    """Return the answer as jobs take it."""
    return LineResponse(
        status_code=answered.status_code, request_id=answered.request_id, body=unpack_body(answered.body)
    )
