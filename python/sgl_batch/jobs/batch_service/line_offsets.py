"""Owns where every 1000th line of an input begins, so that reading can start near any line."""

from __future__ import annotations

from array import array

from sgl_batch.jobs.line_reader import LineStart, RawLine

LINES_APART = 1000


class LineOffsets:
    """The offsets of one input, collected during validation: 16 bytes for each 1000 lines."""

    def __init__(self, packed: bytes = b"") -> None:
        self._values = array("Q")
        self._values.frombytes(packed)

    def note(self, line: RawLine) -> None:
        """Take note of the next line."""
        if line.index % LINES_APART == 0:
            self._values.extend((line.offset, line.number - 1))

    def packed(self) -> bytes:
        """Return the offsets as they are stored in the job's row."""
        return self._values.tobytes()

    def before(self, index: int) -> LineStart:
        """Return the nearest start at or before the line `index`."""
        position = index // LINES_APART
        offset, lines_before = self._values[2 * position : 2 * position + 2]
        return LineStart(offset=offset, index=position * LINES_APART, lines_before=lines_before)
