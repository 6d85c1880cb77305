"""Owns how durations are shown to people."""

from __future__ import annotations

_MINUTE_S, _HOUR_S = 60, 3600


def in_words(seconds: float) -> str:
    """Return a duration with three digits or so: 0.41 ms, 4.13 s, 12.5 min or 3.4 h."""
    if abs(seconds) < 0.1:
        return f"{1000 * seconds:.3g} ms"
    if abs(seconds) < 2 * _MINUTE_S:
        return f"{seconds:.2f} s" if abs(seconds) < 10 else f"{seconds:.1f} s"
    if abs(seconds) < 2 * _HOUR_S:
        return f"{seconds / _MINUTE_S:.1f} min"
    return f"{seconds / _HOUR_S:,.1f} h"
