"""Owns capturing GPU work so that one launch runs it again. The callers decide what is captured, and when.

This has not run on a GPU yet. Its users are tested on a CPU, with graphs that run their work anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from sgl_batch.sglang_adapter.forward import model_capture_mode


class CaptureError(Exception):
    """Work that cannot be captured. It ran once, so its effect is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """Captured work: `replay` runs it again on the same memory; `num_bytes` is the device memory that it takes."""

    replay: Callable[[], None]
    num_bytes: int


class Graphs(Protocol):
    """Captures work that reads and writes memory of the caller's only."""

    def capture(self, run: Callable[[], None]) -> Captured:
        """Run the work once, for its effect, and return the captured work. Raises CaptureError."""

    def release(self) -> None:
        """Free the memory of everything captured so far. The caller replays none of it afterwards."""


class CudaGraphs:
    """Graphs of torch's current GPU, all in one memory pool. They run one after the other, on one stream at a time.

    Each graph overwrites what the one before left in the pool.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> Captured:
        """As `Graphs.capture`. The first run also loads kernels and makes workspaces, which a capture may not do.

        The memory of that run stays with the capture stream and is counted to the first capture.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        # In this mode models choose what can be captured, as they do for SGLang's own graphs.
        free_bytes = torch.cuda.mem_get_info()[0]
        with model_capture_mode(), torch.cuda.stream(self._stream):
            run()
            self._stream.synchronize()
            graph = self._record(run)
        return Captured(replay=graph.replay, num_bytes=max(free_bytes - torch.cuda.mem_get_info()[0], 0))

    def release(self) -> None:
        # A pool whose last graph is gone cannot be captured into again.
        self._pool = torch.cuda.graph_pool_handle()

    def _record(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record the work as a graph, without effect. Copies of other threads continue meanwhile."""
        graph = torch.cuda.CUDAGraph()
        try:
            # torch.cuda.graph would empty the allocator's cache in the middle of a run.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        except RuntimeError as error:
            # If the work fails, the end of its capture fails too, with a less useful message.
            raise CaptureError(str(error.__context__ or error)) from error
        return graph
