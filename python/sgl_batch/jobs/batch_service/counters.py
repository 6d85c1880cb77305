"""Owns what the service counts since its start, for metrics."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True, kw_only=True)
class ServiceCounters:
    """Numbers that only grow. After a restart of the server they begin at 0."""

    lines_completed: int = 0
    lines_failed: int = 0
    lines_rerun: int = 0  # suspects that ran again
    lines_resumed: int = 0  # those of them that had a partial output
    tokens_resumed: int = 0  # the tokens of these partial outputs
    tokens_in: int = 0
    tokens_out: int = 0
    commits: int = 0
    commit_s: float = 0.0
    committed_bytes: int = 0
    engine_deaths: int = 0
    jobs_created: int = 0
    jobs_ended: int = 0

    def as_dict(self) -> dict[str, float]:
        """Return the numbers by name."""
        return {one.name: float(getattr(self, one.name)) for one in fields(self)}
