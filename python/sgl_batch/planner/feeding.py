"""Owns what it takes to feed several instances: one process gives them all lines, and takes all answers."""

from __future__ import annotations

from typing import Final

FEEDING_LINE_S: Final = 25e-6
"""Processor seconds of a line in the process that feeds instances, by `benchmark/instance_feeding.py` on one machine;
assumed for all others."""


def feeding_s(lines: int, instances: int) -> float:
    """Return the seconds that feeding `lines` to so many instances adds to a batch; none for one instance alone.

    They are added whole: where the front has no core of its own, an instance waits for it.
    """
    return FEEDING_LINE_S * lines if instances > 1 else 0.0
