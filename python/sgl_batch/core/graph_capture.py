"""Decides for which numbers of rows a decode step is captured as a CUDA graph, and when. Pure bookkeeping."""

from __future__ import annotations

from collections import Counter

# Passes of one size before that size is captured. A capture costs about as much as a few passes that launch every
# kernel, and a size that was used so often is likely to be used again: group sizes change at boundaries, tens of steps
# apart.
PASSES_BEFORE_CAPTURE = 4
_STEPS_TO_DOUBLE = 4


def captured_rows(num_rows: int, most: int) -> int:
    """Return the smallest size of a capture that holds `num_rows`, at most `most`, which holds them too.

    Sizes are powers of two and, from 8 on, three sizes between two of them: at most a quarter of the rows is padding.
    """
    assert 0 < num_rows <= most, f"{num_rows} rows where 1 to {most} can be"
    double = 1 << (num_rows - 1).bit_length()
    step = max(double // (2 * _STEPS_TO_DOUBLE), 1) if double > 8 else double
    return min(-(-num_rows // step) * step, most)


def graph_budget(
    asked_bytes: int,
    *,
    device_captures: bool,
    metadata_on_device: bool,
    num_ranks: int,
    streamed_weights: bool,
    reports_expert_choices: bool,
    yields_to_user: bool,
) -> int:
    """Return the device memory for graphs of decode steps in bytes: `asked_bytes`, or 0 if graphs are impossible.

    `device_captures`: there is a GPU, and graphs are not switched off. `metadata_on_device`: attention plans a step
    without the host. A graph cannot fetch weights, wait for other ranks or call a user's function (`yields_to_user`),
    and it would report the expert choices of the pass in which it was captured.
    """
    impossible = num_ranks > 1 or streamed_weights or reports_expert_choices or yields_to_user
    return asked_bytes if device_captures and metadata_on_device and not impossible else 0


class Captures:
    """The sizes that are captured, within `budget_bytes` (0: none).

    The largest size is captured first: captures share memory, and the smaller ones fit into what it took. Captures stop
    when they have reached the budget, so that the last one may exceed it.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes, self._used_bytes, self._captured_bytes = budget_bytes, 0, 0
        self._passes: Counter[int] = Counter()
        self._captured: set[int] = set()

    @property
    def _has_budget_left(self) -> bool:
        return self._used_bytes < self._budget_bytes

    def size_for(self, num_rows: int, most: int) -> int | None:
        """Return the size of the graph with which a pass of `num_rows` rows runs, or None if it runs eagerly.

        If that size is not captured yet, this pass captures it. `most`: the size of the largest group.
        """
        size = captured_rows(num_rows, most)
        self._passes[size] += 1
        if size in self._captured:
            return size
        if not self._has_budget_left or self._passes[size] < PASSES_BEFORE_CAPTURE:
            return None
        return size if self._captured else most

    def add(self, size: int, num_bytes: int) -> None:
        """Note that a size is captured, with the memory that it took."""
        self._captured.add(size)
        self._captured_bytes += num_bytes
        self._used_bytes += num_bytes

    def spend(self, num_bytes: int) -> None:
        """Note memory that captures need besides their own."""
        self._used_bytes += num_bytes

    def stop(self) -> None:
        """Capture nothing more; existing captures stay."""
        self._budget_bytes = 0

    def forget(self) -> int:
        """Drop all captures, because the limits of groups have changed. Return the bytes that are free again."""
        freed, self._captured_bytes = self._captured_bytes, 0
        self._used_bytes -= freed
        self._passes.clear()
        self._captured.clear()
        return freed
