"""What a failing process says reaches the engine's own, whole; the first that fails is heard."""

from __future__ import annotations

import threading
from pathlib import Path

from sgl_batch.distributed.rendezvous import Failure, Rendezvous


def test_the_first_that_fails_is_heard_with_its_code_and_traceback(tmp_path: Path) -> None:
    rendezvous = Rendezvous(tmp_path)
    rendezvous.report_failure("x is 3;\nsay 4", code="bad_usage")
    rendezvous.report_failure("second", traceback="Traceback")
    assert rendezvous.failure == Failure(text="x is 3;\nsay 4", code="bad_usage", traceback="")


def test_whoever_waits_for_a_failure_hears_it_or_goes_on(tmp_path: Path) -> None:
    rendezvous = Rendezvous(tmp_path)
    rendezvous.await_failure(0.05)
    assert rendezvous.failure is None
    telling = threading.Thread(target=rendezvous.report_failure, args=("a rank died",))
    telling.start()
    rendezvous.await_failure(60.0)
    telling.join()
    assert rendezvous.failure == Failure(text="a rank died", code=None, traceback="")
