"""SGLang's profiler of a scheduler process, with an end: how long it may go on is decided by whoever makes it."""

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
    """Stands in the place of SGLang's SchedulerProfilerManager, for the two calls that its scheduler makes.

    `must_end` says why a profile that is under way has to end (None: it need not), and is asked after each step and
    whenever the scheduler is idle; with False it hears that none is under way. `give_back` returns freed memory to the
    kernel. `alone`: other ranks may stop at other steps, and none waits for the others to write their traces.
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
        """Start or stop, as asked; SGLang would lose a profiler that is started while it runs."""
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
        """End a profile whose time or memory is over."""
        why = self._must_end(bool(self._profiler.profile_in_progress))
        if why is not None:
            logger.warning("the profile is ended: %s", why)
            self._guarded(self._profiler._stop_profile)
            self._after(was_under_way=True)

    def _after(self, was_under_way: bool) -> None:
        """Give the memory of a profile that has ended back: its events refer to each other, in many small pieces."""
        if was_under_way and not self._profiler.profile_in_progress:
            gc.collect()
            self._give_back()

    def _guarded(self, do: Callable[[], Any]) -> Any:
        """A trace that cannot be written is lost, and not the engine with it."""
        try:
            return do()
        except (OSError, RuntimeError) as error:
            logger.exception("the profile is given up")
            self._profiler.torch_profiler = None
            self._profiler.profile_in_progress = False
            return ProfileReqOutput(success=False, message=f"the profile is given up: {error}")
