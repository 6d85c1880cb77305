"""Decides for how many rows a decode step is captured as a graph, and when. Pure bookkeeping."""

from __future__ import annotations

from collections import Counter

# A capture costs about as much as a few passes that launch every kernel, and a size met as often is likely to come
# again: group sizes change at boundaries, tens of steps apart.
PASSES_BEFORE_CAPTURE = 4
_STEPS_TO_DOUBLE = 4


def captured_rows(num_rows: int, most: int) -> int:
    """The least size of a capture that holds `num_rows`; at most `most`, which holds them too.

    Powers of two, and three sizes between two of them from 8 on: a quarter of the rows is padding at most.
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
    """Device memory for graphs of decode steps: what is asked for, or 0 where they cannot be.

    `device_captures`: there is a GPU, and its graphs are not switched off. `metadata_on_device`: the attention backend
    makes a step's metadata without the host. A graph cannot fetch weights, wait for other ranks or call a user's
    function (`yields_to_user`), and would report the choice of experts of the pass in which it was captured.
    """
    impossible = num_ranks > 1 or streamed_weights or reports_expert_choices or yields_to_user
    return asked_bytes if device_captures and metadata_on_device and not impossible else 0


class Captures:
    """Which sizes are captured, within `budget_bytes` (0: none).

    The largest size comes first: captures share their memory, and the smaller ones fit into what it took. The budget is
    full when what was captured has reached it, so that the last capture may go beyond.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes, self._used_bytes, self._captured_bytes = budget_bytes, 0, 0
        self._met: Counter[int] = Counter()
        self._captured: set[int] = set()

    @property
    def _goes_on(self) -> bool:
        return self._used_bytes < self._budget_bytes

    def size_for(self, num_rows: int, most: int) -> int | None:
        """At which size a pass of `num_rows` rows runs as a graph, captured before or in this pass; None: eagerly.

        `most`: the size of the largest group.
        """
        size = captured_rows(num_rows, most)
        self._met[size] += 1
        if size in self._captured:
            return size
        if not self._goes_on or self._met[size] < PASSES_BEFORE_CAPTURE:
            return None
        return size if self._captured else most

    def add(self, size: int, num_bytes: int) -> None:
        """A size is captured."""
        self._captured.add(size)
        self._captured_bytes += num_bytes
        self._used_bytes += num_bytes

    def spend(self, num_bytes: int) -> None:
        """Memory that captures need beside their own."""
        self._used_bytes += num_bytes

    def stop(self) -> None:
        """Nothing more is captured; what is, stays."""
        self._budget_bytes = 0

    def forget(self) -> int:
        """Nothing is captured any more: the limits of groups have changed. Returns the bytes that are free again."""
        freed, self._captured_bytes = self._captured_bytes, 0
        self._used_bytes -= freed
        self._met.clear()
        self._captured.clear()
        return freed
