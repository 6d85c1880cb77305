"""Owns the SQL of finished lines and of suspects. The bytes of result lines are in the segment (segment.py)."""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

LineKey = tuple[int, int]
"""(seq of the job, index of the line)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What finished lines add to the counts of their job's row. `engine_`: of those that the engine answered."""

    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    engine_lines: int = 0
    engine_input_tokens: int = 0
    engine_output_tokens: int = 0

    def of_engine(self) -> Totals:
        """Return the same totals, of lines that the engine answered."""
        return replace(
            self,
            engine_lines=self.completed + self.failed,
            engine_input_tokens=self.input_tokens,
            engine_output_tokens=self.output_tokens,
        )

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            completed=self.completed + other.completed,
            failed=self.failed + other.failed,
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            reasoning_tokens=self.reasoning_tokens + other.reasoning_tokens,
            engine_lines=self.engine_lines + other.engine_lines,
            engine_input_tokens=self.engine_input_tokens + other.engine_input_tokens,
            engine_output_tokens=self.engine_output_tokens + other.engine_output_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """Where the result line of a request line lies in the segment, in bytes; the column of `offset` is `place`."""

    line_index: int
    offset: int
    num_bytes: int
    failed: bool


def segment_bytes(connection: sqlite3.Connection, job_seq: int) -> int:
    """Return how many bytes of a job's segment are committed."""
    return int(connection.execute("SELECT segment_bytes FROM jobs WHERE seq = ?", (job_seq,)).fetchone()[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResults:
    """What one commit brings to one job: its rows, their totals, and where its segment and its engine time are then."""

    job_seq: int
    rows: Sequence[ResultRow]
    totals: Totals
    segment_bytes: int
    engine_s: float


def add_results(connection: sqlite3.Connection, results: JobResults) -> None:
    """Add the rows of one job's lines, and add their totals to the job's counts."""
    job_seq, rows, totals = results.job_seq, results.rows, results.totals
    values = [(job_seq, one.line_index, one.offset, one.num_bytes, one.failed) for one in rows]
    connection.executemany("INSERT INTO results VALUES (?, ?, ?, ?, ?)", values)
    connection.execute(
        """UPDATE jobs SET completed = completed + ?, failed = failed + ?, input_tokens = input_tokens + ?,
            output_tokens = output_tokens + ?, cached_tokens = cached_tokens + ?,
            reasoning_tokens = reasoning_tokens + ?, engine_lines = engine_lines + ?,
            engine_input_tokens = engine_input_tokens + ?, engine_output_tokens = engine_output_tokens + ?,
            engine_s = ?, segment_bytes = ? WHERE seq = ?""",
        (
            *(totals.completed, totals.failed, totals.input_tokens, totals.output_tokens),
            *(totals.cached_tokens, totals.reasoning_tokens),
            *(totals.engine_lines, totals.engine_input_tokens, totals.engine_output_tokens),
            *(results.engine_s, results.segment_bytes, job_seq),
        ),
    )


def finished_among(connection: sqlite3.Connection, job_seq: int, indexes: Iterable[int]) -> set[int]:
    """Return which of these lines are committed."""
    sql = "SELECT 1 FROM results WHERE job = ? AND line_index = ?"
    return {index for index in indexes if connection.execute(sql, (job_seq, index)).fetchone()}


def finished_lines(connection: sqlite3.Connection, job_seq: int) -> Iterator[int]:
    """Return the indexes of all committed lines, in order."""
    cursor = connection.execute("SELECT line_index FROM results WHERE job = ? ORDER BY line_index", (job_seq,))
    return (int(row[0]) for row in cursor)


def result_rows(connection: sqlite3.Connection, job_seq: int) -> Iterator[ResultRow]:
    """Yield all committed lines in input order."""
    cursor = connection.execute(
        "SELECT line_index, place, num_bytes, failed FROM results WHERE job = ? ORDER BY line_index", (job_seq,)
    )
    for index, offset, num_bytes, failed in cursor:
        yield ResultRow(line_index=index, offset=offset, num_bytes=num_bytes, failed=bool(failed))


def extents(connection: sqlite3.Connection, job_seq: int, end: int, *, failed: bool) -> array[int]:
    """Return offset and length, flat, of the result lines of lines before `end`, in input order: 16 bytes for each."""
    cursor = connection.execute(
        "SELECT place, num_bytes FROM results WHERE job = ? AND line_index < ? AND failed = ? ORDER BY line_index",
        (job_seq, end, failed),
    )
    found = array("Q")
    for row in cursor:
        found.extend(row)
    return found


def delete_some_results(connection: sqlite3.Connection, job_seq: int, limit: int) -> bool:
    """Delete up to `limit` rows of an ended job. Return whether more may be left."""
    deleted = connection.execute(
        """DELETE FROM results WHERE job = ? AND line_index IN
            (SELECT line_index FROM results WHERE job = ? ORDER BY line_index LIMIT ?)""",
        (job_seq, job_seq, limit),
    ).rowcount
    return deleted == limit


def suspects_of_job(connection: sqlite3.Connection, job_seq: int) -> list[tuple[int, LineKey]]:
    """Return the suspected lines of a job, each with the number of its group (the column `lot`)."""
    cursor = connection.execute(
        "SELECT lot, job, line_index FROM suspects WHERE job = ? ORDER BY lot, line_index", (job_seq,)
    )
    return [(int(group), (int(job), int(index))) for group, job, index in cursor]


def replace_group(
    connection: sqlite3.Connection,
    old: int | None,
    suspects: Iterable[LineKey],
    groups: Iterable[tuple[int, Sequence[LineKey]]],
) -> None:
    """Replace the group `old` by `groups`, each with its number; together they hold `suspects`."""
    if old is not None:
        connection.execute("DELETE FROM suspects WHERE lot = ?", (old,))
    clear_suspects(connection, suspects)
    rows = [(job, index, group) for group, lines in groups for job, index in lines]
    connection.executemany("INSERT INTO suspects (job, line_index, lot) VALUES (?, ?, ?)", rows)


def clear_suspects(connection: sqlite3.Connection, lines: Iterable[LineKey]) -> None:
    """Delete the suspicion of lines that are finished."""
    connection.executemany("DELETE FROM suspects WHERE job = ? AND line_index = ?", lines)


def clear_suspects_of_job(connection: sqlite3.Connection, job_seq: int) -> None:
    """Delete the suspects of an ended job: none of its lines runs again."""
    connection.execute("DELETE FROM suspects WHERE job = ?", (job_seq,))
