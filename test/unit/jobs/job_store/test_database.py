"""The schema's versions, and that every commit reaches the disk."""

from __future__ import annotations

import sqlite3

import pytest

from sgl_batch.errors import ConfigError
from sgl_batch.jobs.job_store.database import connect, migrate, migrations, transaction
from sgl_batch.jobs.job_store.job_rows import known_job


def test_a_database_newer_than_the_program_is_refused(tmp_path):
    path = tmp_path / "jobs.sqlite"
    connection = connect(path)
    migrate(connection, path)
    newest = max(migrations())
    assert connection.execute("PRAGMA user_version").fetchone() == (newest,)
    migrate(connection, path)
    connection.execute(f"PRAGMA user_version = {newest + 1}")
    with pytest.raises(ConfigError, match=f"has version {newest + 1} and this program knows versions up to {newest}"):
        migrate(connection, path)
    connection.close()


def test_a_job_of_an_earlier_program_has_had_no_engine_time(tmp_path):
    connection = connect(tmp_path / "jobs.sqlite")
    for number in (1, 2):
        connection.executescript(f"{migrations()[number]}; PRAGMA user_version = {number}")
    names = "id, status, endpoint, completion_window, input_file_id, seed, taken_over, output_file_id, error_file_id"
    values = ("batch_1", "in_progress", "/v1/completions", "24h", "file-1", 0, 1, "file-2", "file-3", 7, 0, 0)
    connection.execute(f"INSERT INTO jobs ({names}, completed, created_at, expires_at) VALUES (?{', ?' * 11})", values)
    migrate(connection, tmp_path / "jobs.sqlite")
    row = known_job(connection, "batch_1")
    assert (row.completed, row.engine_s, row.engine_lines, row.engine_output_tokens) == (7, 0.0, 0, 0)
    connection.close()


def test_commits_wait_for_the_disk_and_foreign_keys_hold(tmp_path):
    connection = connect(tmp_path / "jobs.sqlite")
    migrate(connection, tmp_path / "jobs.sqlite")
    pragmas = [
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous", "foreign_keys")
    ]
    assert pragmas == ["wal", 2, 1]
    with pytest.raises(sqlite3.IntegrityError), transaction(connection):
        connection.execute("INSERT INTO results VALUES (99, 0, 0, 1, 0)")
    connection.close()


def test_a_transaction_that_fails_leaves_nothing(tmp_path):
    connection = connect(tmp_path / "jobs.sqlite")
    connection.execute("CREATE TABLE t (x INTEGER PRIMARY KEY)")
    with pytest.raises(sqlite3.IntegrityError), transaction(connection):
        connection.executemany("INSERT INTO t VALUES (?)", [(1,), (1,)])
    with transaction(connection):
        connection.execute("INSERT INTO t VALUES (2)")
    assert connection.execute("SELECT x FROM t").fetchall() == [(2,)]
    connection.close()
