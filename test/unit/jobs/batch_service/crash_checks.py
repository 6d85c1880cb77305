"""Starts the crashing client as a process of its own, and checks what it leaves."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from crashing_client import first_lines, second_lines
from scripted_engines import answer

from sgl_batch.jobs.failpoints import VARIABLE
from sgl_batch.jobs.seeds import line_seed

PROGRAM = Path(__file__).with_name("crashing_client.py")
WAIT_S = 60


def start_client(directory: Path, failpoint: str = "", *, scale: int = 1) -> subprocess.Popen[str]:
    """Start the client, which is killed at the failpoint, if one is given."""
    environment = {**os.environ, VARIABLE: failpoint}
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), str(directory), str(scale)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def was_killed(client: subprocess.Popen[str]) -> bool:
    """Wait for the client. Return True when it was killed, False when it is done; anything else is its fault."""
    out, err = client.communicate(timeout=WAIT_S)
    if client.returncode == -signal.SIGKILL:
        return True
    assert (client.returncode, out) == (0, "done\n"), err
    return False


def check_counts(directory: Path) -> None:
    """Check that the counts of each running job equal its committed results, and that its segment holds them all."""
    path = directory / "jobs" / "jobs.sqlite"
    if not path.exists():
        return
    database = sqlite3.connect(path)
    sql = """SELECT id, completed, failed, segment_bytes, (SELECT count(*) FROM results WHERE job = seq AND NOT failed),
        (SELECT count(*) FROM results WHERE job = seq AND failed), (SELECT sum(num_bytes) FROM results WHERE job = seq)
        FROM jobs WHERE coalesce(completed_at, failed_at, expired_at, cancelled_at) IS NULL"""
    has_tables = database.execute("PRAGMA user_version").fetchone()[0]
    for job, completed, failed, segment_bytes, num_good, num_failed, num_bytes in database.execute(
        sql if has_tables else "SELECT 1 WHERE 0"
    ):
        assert (completed, failed, segment_bytes) == (num_good, num_failed, num_bytes or 0)
        if segment_bytes:
            assert (directory / "jobs" / "segments" / job).stat().st_size >= segment_bytes
    database.close()


def check_jobs(directory: Path, *, scale: int = 1) -> None:
    """Check after `done` that each line of each job has exactly one result line, the same as without a crash."""
    statuses = _rows(directory, "SELECT id, status FROM jobs ORDER BY seq")
    assert [status for _, status in statuses] == ["completed", "cancelled", "completed"]
    first, second, third = (_result_lines(directory, job) for job, _ in statuses)
    _check_first(directory, statuses[0][0], first_lines(scale), *first)
    given = second_lines(scale)
    good, errors = second
    _check_answers(directory, statuses[1][0], given, good)
    assert sorted((*_ids(good), *_ids(errors))) == sorted(_ids(given))
    assert len(good) >= 48 * scale
    assert {error["error"]["code"] for error in errors} == {"batch_cancelled"}
    good, errors = third
    assert (_ids(good), errors) == (_ids(given), [])
    _check_answers(directory, statuses[2][0], given, good)
    # The third job reused the results of the second one, and did not run these lines again.
    assert set((directory / "client" / "prompts_at_last").read_text().split()) == {"hold"}
    leftovers = [[*(directory / "jobs" / folder).iterdir()] for folder in ("segments", "partial", "scratch")]
    assert leftovers == [[], [], []]
    assert _rows(directory, "SELECT * FROM results UNION ALL SELECT *, 0, 0 FROM suspects") == []
    files = {path.name for path in (directory / "jobs" / "files").iterdir()}
    assert files == {one for (one,) in _rows(directory, "SELECT id FROM files")}


def _check_first(directory: Path, job: str, given: list[Any], good: list[Any], errors: list[Any]) -> None:
    failing = {"poison": (500, "engine_crashed"), "refuse": (400, "context_length_exceeded"), "bad": (400, "invalid_n")}
    assert _ids(good) == [one for one in _ids(given) if one not in failing]
    _check_answers(directory, job, given, good)
    found = {
        one["custom_id"]: (one["response"]["status_code"], one["response"]["body"]["error"]["code"]) for one in errors
    }
    assert (found, len(errors)) == (failing, 3)


def _check_answers(directory: Path, job: str, lines: list[dict[str, Any]], good: Iterable[Any]) -> None:
    seed = int((directory / "client" / f"{job}.seed").read_text())
    expected = {
        one["custom_id"]: answer({**one["body"], "seed": line_seed(seed, index)}).body
        for index, one in enumerate(lines)
    }
    for one in good:
        assert one["response"]["body"] == expected[one["custom_id"]]


def _result_lines(directory: Path, job: str) -> tuple[list[Any], list[Any]]:
    both = [(directory / "client" / f"{job}.{kind}").read_text().splitlines() for kind in ("output", "errors")]
    return [json.loads(one) for one in both[0]], [json.loads(one) for one in both[1]]


def _ids(result_lines: Iterable[Any]) -> list[str]:
    return [one["custom_id"] for one in result_lines]


def _rows(directory: Path, sql: str) -> list[Any]:
    database = sqlite3.connect(directory / "jobs" / "jobs.sqlite")
    try:
        return database.execute(sql).fetchall()
    finally:
        database.close()
