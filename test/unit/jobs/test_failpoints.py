"""Failpoints are off unless the environment names one that exists."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import pytest

from sgl_batch.errors import ConfigError
from sgl_batch.jobs import failpoints
from sgl_batch.jobs.failpoints import VARIABLE, failpoint_names, parse_failpoint

PASS_TWICE = """
import sys
from sgl_batch.jobs.failpoints import failpoint
for _ in range(2):
    failpoint("committer.committed")
    sys.stdout.write("passed\\n")
    sys.stdout.flush()
"""


def run(value):
    environment = {**os.environ, VARIABLE: value}
    return subprocess.run(
        [sys.executable, "-c", PASS_TWICE], env=environment, capture_output=True, text=True, check=False
    )


def test_names_come_from_the_source():
    assert {"committer.segment_synced", "finalizer.output_named", "uploads.row_committed"} <= set(failpoint_names())
    assert len(failpoint_names()) > 20


def test_failpoints_are_off_by_default():
    assert parse_failpoint("") is parse_failpoint(None) is None
    assert run("").stdout == "passed\npassed\n"
    assert run("committer.rows_written").stdout == "passed\npassed\n"


def test_the_process_is_killed_at_the_pass_asked_for():
    done = run("committer.committed:2")
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "passed\n")
    assert run("committer.committed").stdout == ""


def test_an_error_is_raised_once(monkeypatch):
    monkeypatch.setattr(failpoints, "_armed", parse_failpoint("committer.committed=enospc:2"))
    failpoints.failpoint("committer.committed")
    failpoints.failpoint("finalizer.output_named")
    with pytest.raises(OSError, match=r"committer\.committed") as error:
        failpoints.failpoint("committer.committed")
    assert error.value.errno == errno.ENOSPC
    failpoints.failpoint("committer.committed")


@pytest.mark.parametrize("text", ["committer.nothing", "committer.committed=full", "committer.committed:x"])
def test_an_unknown_failpoint_is_refused(text):
    with pytest.raises(ConfigError, match="names no failpoint"):
        parse_failpoint(text)
