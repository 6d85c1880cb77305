"""The report of a failing process reaches the engine's own process whole, and only the first one is kept."""

from __future__ import annotations

import threading
from pathlib import Path

from sgl_batch.distributed.rendezvous import Failure, Rendezvous


def test_the_first_reported_failure_is_kept_with_its_code_and_traceback(tmp_path: Path) -> None:
    rendezvous = Rendezvous(tmp_path)
    rendezvous.report_failure("x is 3;\nsay 4", code="bad_usage")
    rendezvous.report_failure("second", traceback="Traceback")
    assert rendezvous.failure == Failure(text="x is 3;\nsay 4", code="bad_usage", traceback="")


def test_await_failure_returns_at_a_report_or_after_its_timeout(tmp_path: Path) -> None:
    rendezvous = Rendezvous(tmp_path)
    rendezvous.await_failure(0.05)
    assert rendezvous.failure is None
    reporting_failure = threading.Thread(target=rendezvous.report_failure, args=("a rank died",))
    reporting_failure.start()
    rendezvous.await_failure(60.0)
    reporting_failure.join()
    assert rendezvous.failure == Failure(text="a rank died", code=None, traceback="")
