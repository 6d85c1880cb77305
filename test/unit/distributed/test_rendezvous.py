"""What a failing process says reaches the engine's own; what another rank's end is, those say that watch it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from sgl_batch.distributed.rank_errors import PeerLost
from sgl_batch.distributed.rendezvous import Rendezvous
from sgl_batch.errors import BAD_USAGE, ConfigError, EngineError, StoreError


def failure(directory: Path, error: Exception, rank: int | None = None) -> tuple[str | None, str | None]:
    """What is heard after a process has failed, its error passed on."""
    directory.mkdir()
    rendezvous = Rendezvous(directory)
    with pytest.raises(type(error)), rendezvous.telling(rank):
        raise error
    return rendezvous.failure, rendezvous.failure_code


def test_an_error_of_ours_is_told_word_for_word_with_its_code_and_by_rank(tmp_path: Path) -> None:
    assert failure(tmp_path / "one", EngineError("no file")) == ("no file", None)
    told = failure(tmp_path / "several", ConfigError("x is 3; say 4"), rank=2)
    assert told == ("rank 2 of the engine failed: x is 3; say 4", BAD_USAGE)
    assert failure(tmp_path / "store", StoreError("disk full")) == ("disk full", StoreError.code)


def test_the_first_that_fails_is_heard(tmp_path: Path) -> None:
    rendezvous = Rendezvous(tmp_path)
    for text in ("first", "second"):
        with pytest.raises(EngineError), rendezvous.telling():
            raise EngineError(text)
    assert rendezvous.failure == "first"


@pytest.mark.parametrize("error", [PeerLost(1, awaiting="a step", seconds=0.1), ZeroDivisionError("a fault of ours")])
def test_the_loss_of_another_rank_and_faults_of_the_program_are_told_by_others(
    error: Exception, tmp_path: Path
) -> None:
    assert failure(tmp_path / "run", error, rank=0) == (None, None)


def test_whoever_waits_for_a_failure_hears_it_or_goes_on(tmp_path: Path) -> None:
    rendezvous = Rendezvous(tmp_path)
    rendezvous.await_failure(0.05)
    assert rendezvous.failure is None
    telling = threading.Thread(target=rendezvous.report_failure, args=("a rank died",))
    telling.start()
    rendezvous.await_failure(60.0)
    telling.join()
    assert rendezvous.failure == "a rank died"
