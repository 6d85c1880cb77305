"""Owns how long the prompts and outputs of a run's answers were: of all, or of an even sample in bounded memory."""

from __future__ import annotations

from sgl_batch.planner.workload import Request, Workload

_MOST_KEPT = 8192


class RunLengths:
    """Lengths by the number of the line. With many lines, those of every second, fourth, ... line are kept."""

    def __init__(self, most_kept: int = _MOST_KEPT) -> None:
        self._most_kept, self._every = most_kept, 1
        self._kept: dict[int, tuple[Request, int]] = {}
        self._num_sequences = 0

    def add(self, index: int, *, prompt: int, output: int, choices: int = 1) -> None:
        """Note an answered line. `output`: the tokens of all its choices together."""
        choices = max(choices, 1)
        if prompt < 1 or output < choices:
            return
        self._num_sequences += choices
        if index % self._every == 0:
            self._kept[index] = Request(prompt, output // choices), choices
        if len(self._kept) > self._most_kept:
            self._every *= 2
            self._kept = {number: kept for number, kept in self._kept.items() if number % self._every == 0}

    def workload(self) -> Workload | None:
        """Return the batch as it came out, in the order of the lines; None without an answer."""
        found = [request for _, (request, times) in sorted(self._kept.items()) for _ in range(times)]
        return Workload(requests=found, count=self._num_sequences, source="as it came out") if found else None
