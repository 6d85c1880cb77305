"""Owns a stand-in for CUDA graphs on machines without a GPU: a replay runs the work again on the same memory."""

from __future__ import annotations

from collections.abc import Callable

from sgl_batch.model_executor.cuda_graphs import Captured, CaptureError


class RerunningGraphs:
    """Graphs that report `num_bytes` each. Capture number `refused_from`, from 0, and all later ones fail."""

    def __init__(self, num_bytes: int = 1000, refused_from: int | None = None) -> None:
        self.num_bytes, self.refused_from = num_bytes, refused_from
        self.num_captured = self.num_released = 0

    def capture(self, run: Callable[[], None]) -> Captured:
        run()
        if self.num_captured == self.refused_from:
            raise CaptureError("operation not permitted")
        self.num_captured += 1
        return Captured(replay=run, num_bytes=self.num_bytes)

    def release(self) -> None:
        self.num_released += 1
