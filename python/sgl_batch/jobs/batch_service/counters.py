"""What the service counts from its start, for metrics; decides nothing about how it is shown."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True, kw_only=True)
class ServiceCounters:
    """Numbers that only grow. They are of this process: after a restart they begin again."""

    lines_completed: int = 0
    lines_failed: int = 0
    lines_rerun: int = 0  # suspects that were run again
    lines_resumed: int = 0  # those of them of which tokens were known
    tokens_resumed: int = 0  # these tokens
    tokens_in: int = 0
    tokens_out: int = 0
    commits: int = 0
    commit_s: float = 0.0
    committed_bytes: int = 0
    engine_deaths: int = 0
    jobs_created: int = 0
    jobs_ended: int = 0

    def as_dict(self) -> dict[str, float]:
        """By name."""
        return {one.name: float(getattr(self, one.name)) for one in fields(self)}
