"""The tokens known of lines that have no answer yet, in bounded memory; decides nothing about when a line runs."""

from __future__ import annotations

from sgl_batch.core.partial_output import PartialOutput, TokenBudget
from sgl_batch.jobs.job_store.result_rows import LineKey

MAX_TOKENS = 16 << 20  # 64 MiB; of tokens beyond them none are recorded, and their lines go on from fewer


class PartialOutputs:
    """Records by line. They are of this process: after a restart lines start from the beginning."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._budget = TokenBudget(max_tokens)
        self._records: dict[LineKey, PartialOutput] = {}

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_tokens(self) -> int:
        """Tokens in all records."""
        return sum(len(record) for record in self._records.values())

    def of(self, line: LineKey) -> PartialOutput:
        """The record of a line, an empty one of a line that has none."""
        if line not in self._records:
            self._records[line] = PartialOutput(budget=self._budget)
        return self._records[line]

    def forget(self, line: LineKey) -> None:
        """The line has an answer, or is to start from the beginning."""
        if line in self._records:
            self._records.pop(line).close()

    def forget_job(self, seq: int) -> None:
        """Nobody wants the job's answers any more."""
        for line in [line for line in self._records if line[0] == seq]:
            self.forget(line)
