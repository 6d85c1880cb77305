"""Owns the results of a decode step that wait until the device computes the next one. Which step that is, if any, is
decided by whoever holds the results back.

All work of the device is in one stream: the next step finds the tokens of this one there, and the copies for the host
lie between the two. So the host processes results behind the launch of a forward pass and before that of its sampling,
which may want them (grammars) and may wait for the device. On a CPU a forward pass has ended when its call returns:
everything is in the same order there, and nothing is won. Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_batch.model_executor.counters import Counters
from sgl_batch.sglang_adapter.scheduling import copy_results_to_host


def is_wanted(overlap: str) -> bool:
    """What the option says; `auto` is off until it has been measured where there is something to win."""
    return overlap == "on"


class StepOverlap:
    """The results of at most one step. `process(batch, result)` takes them in."""

    def __init__(self, process: Callable[[Any, Any], None], counters: Counters) -> None:
        self._process, self._counters = process, counters
        self._held: tuple[Any, Any] | None = None

    @property
    def under_way(self) -> bool:
        """Whether there are results that nobody has processed."""
        return self._held is not None

    def hold(self, batch: Any, result: Any) -> None:
        """Keep the results of a step that was just launched; its batch may go on to the next one."""
        assert self._held is None, "the results of the step before are processed first"
        copy_results_to_host(batch, result)
        self._held = batch.copy(), result

    def complete(self) -> None:
        """Process what is held: afterwards all is as if no step had been held."""
        held, self._held = self._held, None
        if held is not None:
            self._process(*held)

    def complete_while_computing(self) -> None:
        """The same, of the step before the one that has just been launched."""
        if self._held is not None:
            self._counters.add("decode_steps_overlapped")
            self.complete()
