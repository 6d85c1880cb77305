"""Exit codes and missing lines of a run."""

from __future__ import annotations

import pytest

from sgl_batch.file_run.run_result import RunResult, RunStatus


@pytest.mark.parametrize(
    ("status", "failed", "exit_code"),
    [
        (RunStatus.COMPLETED, 0, 0),
        (RunStatus.COMPLETED, 1, 2),
        (RunStatus.FAILED, 1, 3),
        (RunStatus.INTERRUPTED, 1, 130),
    ],
)
def test_the_exit_code_follows_from_the_status_and_failed_lines(status, failed, exit_code):
    result = RunResult(status=status, message=None, total=10, ok=4, failed=failed, wall_s=1, tokens_in=0, tokens_out=0)
    assert result.exit_code == exit_code
    assert result.missing == 6 - failed
