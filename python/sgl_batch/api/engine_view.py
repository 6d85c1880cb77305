"""Owns what the progress page and the metrics show of the engine: its last statistics and minutes of history."""

from __future__ import annotations

from collections import deque
from typing import Any

from sgl_batch.core.answers import EngineStats

_NUM_SAMPLES = 300
_STATES = ("RUNNING", "READY", "SUSPENDED", "QUEUED", "PREFILLING")


class EngineView:
    """Statistics of the engine, once a second. A restarted engine counts from 0."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = None
        self._samples: deque[dict[str, Any]] = deque(maxlen=_NUM_SAMPLES)

    def begin(self) -> None:
        """Begin with the statistics of another engine."""
        self.stats = None

    def add(self, stats: EngineStats, time_s: float) -> None:
        """Add one reading. `time_s` is Unix time."""
        since = stats.since(self.stats) if self.stats is not None else stats
        calls, rows = since.counters.get("expert_calls", 0), since.counters.get("expert_rows", 0)
        self.stats = stats
        self._samples.append(
            {
                "time": round(time_s, 1),
                **{name.lower(): stats.sequences.get(name, 0) for name in _STATES},
                "tokens_per_expert_call": round(rows / calls, 1) if calls else None,
                "output_tokens": stats.counters.get("output_tokens", 0),
            }
        )

    @property
    def has_sequences(self) -> bool:
        """Whether the engine had any sequence at the last reading."""
        return self.stats is not None and any(self.stats.sequences.values())

    @property
    def is_paused(self) -> bool:
        """Whether the engine was paused at the last reading."""
        return self.stats is not None and self.stats.paused

    def to_json(self) -> dict[str, Any]:
        """Return the JSON for the progress page: `samples` of the last minutes, `part_s` since the start."""
        stats = self.stats
        return {
            "samples": list(self._samples),
            "part_s": {} if stats is None else {name: round(value, 3) for name, value in stats.part_s.items()},
            "counters": {} if stats is None else dict(stats.counters),
            "peak_memory_bytes": 0 if stats is None else stats.peak_memory_bytes,
        }
