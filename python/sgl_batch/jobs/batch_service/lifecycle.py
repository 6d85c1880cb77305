"""Owns the statuses of a job and the table of all moves between them."""

from __future__ import annotations

from enum import StrEnum


class JobStatus(StrEnum):
    """The statuses, with OpenAI's names."""

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
    """A job's status does not allow this move. Another request moved it first, for example."""

    def __init__(self, status: JobStatus, to: JobStatus) -> None:
        super().__init__(f"a job that is {status} cannot become {to}")
        self.status = status


def time_column(status: JobStatus) -> str:
    """Return the column of a job's row with the time at which it came to this status."""
    return f"{status}_at"


def check_transition(status: JobStatus, to: JobStatus) -> None:
    """Raise TransitionError unless a job may go from `status` to `to`."""
    if to not in TRANSITIONS[status]:
        raise TransitionError(status, to)
