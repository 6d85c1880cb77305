"""The report of a process that fails reaches the engine's program with the fault's kind, source line and remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sgl_batch.distributed.rank_errors import PeerLost
from sgl_batch.distributed.rendezvous import Failure, Rendezvous
from sgl_batch.errors import BAD_USAGE, ConfigError, EngineError, StoreError
from sgl_batch.managers import failure_reporter
from sgl_batch.managers.failure_reporter import FailureReporter, fault_text, keep_traceback
from sgl_batch.requests.seeds import choice_seed


@pytest.fixture(autouse=True)
def no_long_wait_for_other_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_reporter, "_AWAIT_REPORT_S", 0.01)


def reported(directory: Path, error: Exception, rank: int | None = None) -> Failure | None:
    """Return the failure that is at the rendezvous after a process has failed."""
    directory.mkdir()
    rendezvous = Rendezvous(directory)
    name = "the scheduler" if rank is None else f"rank {rank} of the engine"
    FailureReporter(rendezvous=rendezvous, name=name, is_rank=rank is not None).report(error)
    return rendezvous.failure


def test_an_error_of_ours_is_reported_verbatim_with_its_code_and_its_rank(tmp_path: Path) -> None:
    assert reported(tmp_path / "one", EngineError("no file")) == Failure(text="no file", code=None, traceback="")
    several = Failure(text="rank 2 of the engine failed: x is 3; say 4", code=BAD_USAGE, traceback="")
    assert reported(tmp_path / "several", ConfigError("x is 3; say 4"), rank=2) == several
    assert reported(tmp_path / "store", StoreError("disk full")) == Failure(
        text="disk full", code=StoreError.code, traceback=""
    )


def test_a_fault_is_reported_with_its_innermost_line_of_ours_and_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(TypeError) as raised:
        choice_seed("7", 1)  # type: ignore[arg-type]
    failure = reported(tmp_path / "run", raised.value, rank=1)
    assert failure is not None
    assert failure.text.startswith("rank 1 of the engine failed: TypeError: ")
    assert "(sgl_batch/requests/seeds.py:" in failure.text
    assert failure.traceback.startswith("Traceback (most recent call last):")
    with pytest.raises(ValueError, match="Expecting") as raised_elsewhere:
        json.loads("{")
    assert fault_text(raised_elsewhere.value).startswith("JSONDecodeError: Expecting property name")
    assert "(decoder.py:" in fault_text(raised_elsewhere.value)
    assert fault_text(torch.OutOfMemoryError("40 GiB")).startswith("OutOfMemoryError: 40 GiB; lower --max-total-tokens")


def test_a_rank_that_lost_another_waits_for_the_report_of_a_process_that_knows_more(tmp_path: Path) -> None:
    lost = reported(tmp_path / "alone", PeerLost(1, awaiting="a step", seconds=0.1), rank=0)
    assert lost is not None
    assert lost.text.startswith("rank 1 of the engine died: rank 1 closed its connection")
    rendezvous = Rendezvous(tmp_path)
    rendezvous.report_failure("rank 1 of the engine died: SIGKILL")
    for error in (PeerLost(1, awaiting="a step", seconds=0.1), RuntimeError("connection reset by peer")):
        FailureReporter(rendezvous=rendezvous, name="rank 0 of the engine", is_rank=True).report(error)
    assert rendezvous.failure == Failure(text="rank 1 of the engine died: SIGKILL", code=None, traceback="")


def test_the_newest_tracebacks_are_kept_and_none_is_named_where_none_can_be_written(tmp_path: Path) -> None:
    messages = [keep_traceback(f"fault {number}", tmp_path) for number in range(20)]
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert len(kept) == 16
    assert keep_traceback("fault 19", tmp_path) == messages[-1], "the same fault has the same file"
    assert Path(messages[-1].rpartition(" ")[2]).read_text() == "fault 19"
    (tmp_path / "elsewhere").touch()
    Path(messages[-1].rpartition(" ")[2]).unlink()
    Path(messages[-1].rpartition(" ")[2]).symlink_to(tmp_path / "elsewhere")
    assert keep_traceback("fault 19", tmp_path) == "", "a link may be another user's"
    assert (tmp_path / "elsewhere").read_text() == ""
    assert messages[-1] == f"; its traceback is in {tmp_path / Path(messages[-1]).name}"
    assert Path(messages[-1]).name in kept
    assert keep_traceback("fault", tmp_path / "none") == ""
