"""Owns the partial outputs of lines that have no answer yet, in bounded memory."""

from __future__ import annotations

from sgl_batch.core.partial_output import PartialOutput, TokenBudget
from sgl_batch.jobs.job_store.result_rows import LineKey

MAX_TOKENS = 16 << 20  # 64 MiB; tokens beyond are not kept, and their lines resume from fewer


class PartialOutputs:
    """Partial outputs by line, in memory only: after a restart of the server lines start from the beginning."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._budget = TokenBudget(max_tokens)
        self._partial_outputs: dict[LineKey, PartialOutput] = {}

    def __len__(self) -> int:
        return len(self._partial_outputs)

    @property
    def num_tokens(self) -> int:
        """How many tokens all partial outputs have."""
        return sum(len(one) for one in self._partial_outputs.values())

    def of(self, line: LineKey) -> PartialOutput:
        """Return the partial output of a line, an empty one where it has none."""
        if line not in self._partial_outputs:
            self._partial_outputs[line] = PartialOutput(budget=self._budget)
        return self._partial_outputs[line]

    def forget(self, line: LineKey) -> None:
        """Drop the partial output of a line that has its answer, or is to start from the beginning."""
        if line in self._partial_outputs:
            self._partial_outputs.pop(line).close()

    def forget_job(self, seq: int) -> None:
        """Drop the partial outputs of a job whose answers are no longer wanted."""
        for line in [line for line in self._partial_outputs if line[0] == seq]:
            self.forget(line)
