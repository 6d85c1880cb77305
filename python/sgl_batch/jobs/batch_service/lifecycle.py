"""The states of a job and every way from one to another, in one table; decides nothing about when a job moves."""

from __future__ import annotations

from enum import StrEnum


class JobStatus(StrEnum):
    """OpenAI's names."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


# An expired job's files are written while it is `finalizing`, a cancelled one's while it is `cancelling`.
TRANSITIONS: dict[JobStatus, frozenset[JobStatus]] = {
    JobStatus.VALIDATING: frozenset({JobStatus.FAILED, JobStatus.IN_PROGRESS, JobStatus.CANCELLING, JobStatus.EXPIRED}),
    JobStatus.IN_PROGRESS: frozenset({JobStatus.FINALIZING, JobStatus.CANCELLING}),
    JobStatus.FINALIZING: frozenset({JobStatus.COMPLETED, JobStatus.EXPIRED}),
    JobStatus.CANCELLING: frozenset({JobStatus.CANCELLED}),
    JobStatus.FAILED: frozenset(),
    JobStatus.COMPLETED: frozenset(),
    JobStatus.EXPIRED: frozenset(),
    JobStatus.CANCELLED: frozenset(),
}

ENDED = frozenset(status for status, following in TRANSITIONS.items() if not following)


class TransitionError(Exception):
    """A job is not in a state from which it can move there (somebody else moved it first)."""

    def __init__(self, status: JobStatus, to: JobStatus) -> None:
        super().__init__(f"a job that is {status} cannot become {to}")
        self.status = status


def time_column(status: JobStatus) -> str:
    """The column of a job's row that says when it came to this status."""
    return f"{status}_at"


def check_transition(status: JobStatus, to: JobStatus) -> None:
    """Raise TransitionError unless a job may go from `status` to `to`."""
    if to not in TRANSITIONS[status]:
        raise TransitionError(status, to)
