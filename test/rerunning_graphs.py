"""Owns graphs for machines without a GPU: the work itself, run anew on the same memory."""

from __future__ import annotations

from collections.abc import Callable

from sgl_batch.model_executor.cuda_graphs import Captured, CaptureError


class RerunningGraphs:
    """`num_bytes`: what each says that it takes; from capture number `refused_from` on none can be made."""

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
