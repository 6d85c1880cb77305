"""Owns capturing GPU work so that one launch runs it again. What is captured, and when, is decided elsewhere.

This has not run on a GPU yet: whoever uses it is tested on a CPU, with graphs that run their work anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from sgl_batch.sglang_adapter.forward import model_capture_mode


class CaptureError(Exception):
    """Work that cannot be captured. It has had its effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """Work that `replay` runs again, on the memory on which it ran first; `num_bytes`: what it takes of the device."""

    replay: Callable[[], None]
    num_bytes: int


class Graphs(Protocol):
    """Captures work that reads and writes memory of its owner's, and leaves nothing else behind."""

    def capture(self, run: Callable[[], None]) -> Captured:
        """Run it for its effect, once, and give what runs it again. Raises CaptureError."""

    def release(self) -> None:
        """Give back the memory of what was captured, none of which is replayed any more."""


class CudaGraphs:
    """Graphs of torch's current GPU, all in one pool of memory: they run one after the other, on one stream at a time.

    What the work leaves behind in that pool, the next graph overwrites.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> Captured:
        """The run for its effect also loads kernels and makes workspaces, which no capture may do.

        It takes memory of its own, which stays with the stream of captures and counts to the first of them.
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
        # A pool whose last graph has gone cannot be captured into again.
        self._pool = torch.cuda.graph_pool_handle()

    def _record(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """The graph of a run without effect. Other threads' copies go on meanwhile."""
        graph = torch.cuda.CUDAGraph()
        try:
            # Not by torch.cuda.graph, which would empty the allocator's cache in the middle of a run.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        except RuntimeError as error:
            # Where the work has failed, so does the end of its capture, with less to say.
            raise CaptureError(str(error.__context__ or error)) from error
        return graph
