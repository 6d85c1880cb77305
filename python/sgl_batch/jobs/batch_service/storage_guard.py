"""Owns whether the jobs directory takes writes, and the repetition of writes that failed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sgl_batch.jobs.batch_service.objects import StorageState
from sgl_batch.jobs.scratch import StorageError

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 10.0


class StorageGuard:
    """Repeats work that must not be lost, ever slower, until the disk takes it. Meanwhile `state` shows the failure."""

    def __init__(self, clock: Callable[[], float], first_retry_s: float = FIRST_RETRY_S) -> None:
        self.num_failures = 0
        self._clock = clock
        self._first_retry_s = first_retry_s
        self._failing: dict[object, StorageState] = {}
        self._on_change: list[Callable[[], None]] = []

    @property
    def state(self) -> StorageState:
        """The oldest failure that still lasts, or that there is none."""
        return next(iter(self._failing.values()), StorageState())

    def subscribe(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` whenever `state` has changed."""
        self._on_change.append(on_change)

    async def persist(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` until it raises no StorageError, and return its result. Each try begins at its start."""
        attempt, retry_s = object(), self._first_retry_s
        try:
            while True:
                try:
                    return await work()
                except StorageError as error:
                    self._failed(attempt, error)
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, LONGEST_RETRY_S)
        finally:
            self._ended(attempt)

    def _failed(self, attempt: object, error: StorageError) -> None:
        self.num_failures += 1
        since = self._failing[attempt].since if attempt in self._failing else int(self._clock())
        if attempt not in self._failing:
            logger.error("the jobs directory does not take writes; what is committed is kept: %s", error)
        self._failing[attempt] = StorageState(
            ok=False,
            message=f"{error}. No line is started until there is room or the disk works again; what is committed is "
            "kept, and writing is tried again",
            since=since,
        )
        self._notify()

    def _ended(self, attempt: object) -> None:
        if self._failing.pop(attempt, None) is not None and not self._failing:
            logger.warning("the jobs directory takes writes again")
            self._notify()

    def _notify(self) -> None:
        for on_change in self._on_change:
            on_change()
