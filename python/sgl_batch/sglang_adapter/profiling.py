"""Adapts SGLang's profiler of a scheduler process: a profile ends at a limit, and an unwritable trace is no crash.

The caller decides the limit.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

from sgl_batch.sglang_adapter import bootstrap

with bootstrap.importing():
    import torch
    from sglang.srt.managers.io_struct import ConfigureLoggingReq, ProfileReq, ProfileReqOutput, ProfileReqType

__all__ = ["ConfigureLoggingReq", "LimitedProfiler", "ProfileReq"]

logger = logging.getLogger(__name__)


class LimitedProfiler:
    """Replaces SGLang's SchedulerProfilerManager, for the two calls that the scheduler makes.

    `must_end` returns the reason why a running profile must end, or None. It is called after each step and when the
    scheduler is idle, with False if no profile runs. `give_back` returns freed memory to the operating system. `alone`:
    other ranks may stop at other steps, so no rank waits for the others to write their traces.
    """

    def __init__(
        self, profiler: Any, must_end: Callable[[bool], str | None], give_back: Callable[[], None], *, alone: bool
    ) -> None:
        self._profiler, self._must_end, self._give_back = profiler, must_end, give_back
        if alone:
            rank = torch.distributed.get_rank()
            own = torch.distributed.new_group([rank], backend="gloo", use_local_synchronization=True)
            profiler.dp_tp_cpu_group = own

    def _profile(self, asked: Any) -> Any:
        """Start or stop a profile, as requested. SGLang would lose a running profiler if it is started again."""
        if asked.req_type == ProfileReqType.START_PROFILE and self._profiler.profile_in_progress:
            return ProfileReqOutput(success=False, message="a profile is under way; end it with /stop_profile")
        was_under_way = self._profiler.profile_in_progress
        answer = self._guarded(lambda: self._profiler._profile(asked))
        self._after(was_under_way)
        return answer

    def _profile_batch_predicate(self, batch: Any) -> None:
        """Before a forward pass."""
        was_under_way = self._profiler.profile_in_progress
        self._guarded(lambda: self._profiler._profile_batch_predicate(batch))
        self._after(was_under_way)
        self.look()

    def look(self) -> None:
        """End a profile whose time or memory is used up."""
        why = self._must_end(bool(self._profiler.profile_in_progress))
        if why is not None:
            logger.warning("the profile is ended: %s", why)
            self._guarded(self._profiler._stop_profile)
            self._after(was_under_way=True)

    def _after(self, was_under_way: bool) -> None:
        """Free the memory of a profile that has ended: many small events, which refer to each other."""
        if was_under_way and not self._profiler.profile_in_progress:
            gc.collect()
            self._give_back()

    def _guarded(self, do: Callable[[], Any]) -> Any:
        """Run a call of the profiler. If the trace cannot be written, it is lost, but the engine continues."""
        try:
            return do()
        except (OSError, RuntimeError) as error:
            logger.exception("the profile is given up")
            self._profiler.torch_profiler = None
            self._profiler.profile_in_progress = False
            return ProfileReqOutput(success=False, message=f"the profile is given up: {error}")
