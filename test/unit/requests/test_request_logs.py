"""Logs and dumps of requests are bounded in size and number, and only their owner reads them."""

from __future__ import annotations

import logging
import os
import stat
from logging.handlers import TimedRotatingFileHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_batch.errors import RequestError
from sgl_batch.requests import request_logs
from sgl_batch.requests.request_logs import (
    LOG_FILES,
    MOST_DUMPED_AT_ONCE,
    WaitingDumps,
    bound_targets,
    check_logging,
    logs_text,
    remove_oldest_dumps,
)
from sgl_batch.sglang_adapter.profiling import ConfigureLoggingReq


def test_request_logs_are_a_few_private_files_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_logs, "LOG_BYTES", 10_000)
    target = logging.Logger("requests", logging.INFO)
    target.addHandler(TimedRotatingFileHandler(tmp_path / "requests.log", when="H"))
    paths = bound_targets([target])
    assert paths == bound_targets([target]) == [str(tmp_path / "requests.log")]
    (tmp_path / "requests.log").chmod(0o644)
    bound_targets([target])
    before = os.umask(0o022)
    try:
        for number in range(2000):
            target.info("request %d %s", number, "x" * 100)
    finally:
        os.umask(before)
    found = list(tmp_path.iterdir())
    assert len(found) == LOG_FILES
    assert sum(path.stat().st_size for path in found) <= LOG_FILES * 10_000
    assert {stat.S_IMODE(path.stat().st_mode) for path in found} == {0o600}
    assert "request 1999 " in (tmp_path / "requests.log").read_text()
    assert f"at most {LOG_FILES} files" in logs_text(paths)
    assert logs_text([]) == "standard output"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"log_requests_level": 4}, "log_requests_level is 4; give 0 to 3"),
        ({"log_requests_format": "xml"}, "give text or json"),
        ({"log_level": "loud"}, "give debug, info"),
        ({"dump_requests_threshold": MOST_DUMPED_AT_ONCE + 1}, "give 1 to 10,000, the limit"),
        ({"dump_requests_threshold": 0}, "give 1 to 10,000"),
        ({"dump_requests_folder": "/proc/no/such"}, "cannot be made"),
    ],
)
def test_logging_that_is_unbounded_or_impossible_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        check_logging(ConfigureLoggingReq(**fields))
    assert caught.value.param in fields
    check_logging(ConfigureLoggingReq(log_requests=True, log_requests_level=3, log_level="debug"))


def test_a_folder_of_dumps_keeps_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_logs, "DUMP_FILES", 4)
    (tmp_path / "mine.pkl").touch()
    for second in range(10):
        dump = tmp_path / f"2026-01-01_00-00-0{second}.pkl"
        dump.write_bytes(b"x" * 100)
        os.utime(dump, (second, second))
    remove_oldest_dumps(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [*(f"2026-01-01_00-00-0{second}.pkl" for second in (7, 8, 9)), "mine.pkl"]
    monkeypatch.setattr(request_logs, "DUMP_BYTES", request_logs.WAITING_BYTES + 150)
    remove_oldest_dumps(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2026-01-01_00-00-09.pkl", "mine.pkl"]


def test_requests_that_wait_for_a_dump_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_logs, "WAITING_BYTES", 1 << 20)
    waiting = WaitingDumps()
    for _ in range(4):
        waiting.add(SimpleNamespace(text="x" * (1 << 18), input_ids=None), {"output_ids": [1, 2]})
    assert waiting.are_too_large
    waiting.keep(2)
    assert not waiting.are_too_large
    waiting.keep(0)
    assert waiting.num_bytes == 0
