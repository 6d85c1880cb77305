"""A profile ends by itself after its steps, its time or its memory. A longer one is refused with the limit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_batch.errors import RequestError
from sgl_batch.requests.profile_limits import (
    DEFAULT_STEPS,
    MOST_BYTES,
    MOST_S,
    MOST_STEPS,
    ProfileWatch,
    check_activities,
    check_directory,
    limits_text,
    steps_of,
)
from sgl_batch.sglang_adapter.profiling import LimitedProfiler, ProfileReq, ProfileReqType


def test_a_profile_has_a_default_number_of_steps_and_a_limit() -> None:
    assert (steps_of(None), steps_of(1), steps_of(MOST_STEPS)) == (DEFAULT_STEPS, 1, MOST_STEPS)
    assert limits_text(7) == "7 steps, 60 s or 256.00 MiB of memory"
    for number in (0, -1, MOST_STEPS + 1):
        with pytest.raises(RequestError, match=f"num_steps is {number}; give 1 to {MOST_STEPS}, the limit") as caught:
            steps_of(number)
        assert (caught.value.status_code, caught.value.param) == (400, "num_steps")


def test_a_profile_that_would_end_the_engine_is_refused(tmp_path: Path) -> None:
    check_activities(None, on_cpu=True)
    check_activities(["MEM"], on_cpu=False)
    for activities in (["CPU", "MEM"], ["RPD"], ["x"], []):
        with pytest.raises(RequestError, match="activities has"):
            check_activities(activities, on_cpu=True)
    assert check_directory(str(tmp_path / "new")).is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="cannot be made"):
        check_directory(str(tmp_path / "file" / "below"))


def test_a_profile_ends_at_its_limit_of_time_or_memory() -> None:
    now, held = [100.0], [5 * MOST_BYTES]
    watch = ProfileWatch(lambda: now[0], lambda: held[0])
    assert watch.must_end(False) is None
    assert watch.must_end(True) is None
    now[0] += MOST_S - 1
    held[0] += MOST_BYTES - 1
    assert watch.must_end(True) is None
    held[0] += 1
    assert "grown by 256.00 MiB" in (watch.must_end(True) or "")
    assert watch.must_end(False) is None
    assert watch.must_end(True) is None, "another one begins"
    now[0] += MOST_S
    assert "taken 60 s" in (watch.must_end(True) or "")


class Profiler:
    """Stands in for SGLang's profiler manager, with the names that are used here."""

    def __init__(self) -> None:
        self.profile_in_progress = False
        self.torch_profiler: object | None = None
        self.fault: Exception | None = None
        self.stops = 0

    def _profile(self, asked: Any) -> Any:
        self.profile_in_progress = asked.req_type == ProfileReqType.START_PROFILE
        return SimpleNamespace(success=True)

    def _profile_batch_predicate(self, batch: Any) -> None:
        if self.fault is not None:
            raise self.fault

    def _stop_profile(self) -> None:
        self.stops += 1
        self.profile_in_progress = False


def test_a_profile_ends_at_a_step_or_while_idle_and_runs_alone() -> None:
    profiler, why = Profiler(), [None, "its time is over"]
    given_back: list[int] = []
    limited = LimitedProfiler(
        profiler, lambda is_under_way: why[0] if is_under_way else None, lambda: given_back.append(1), alone=False
    )
    start = ProfileReq(req_type=ProfileReqType.START_PROFILE)
    for end in (limited.look, lambda: limited._profile_batch_predicate(None)):
        why.sort(key=lambda one: one is not None)
        assert limited._profile(start).success
        assert not limited._profile(start).success
        end()
        assert profiler.profile_in_progress
        why.reverse()
        end()
        assert not profiler.profile_in_progress
    assert (profiler.stops, len(given_back)) == (2, 2)


def test_a_trace_that_cannot_be_written_does_not_end_the_engine() -> None:
    profiler = Profiler()
    limited = LimitedProfiler(profiler, lambda _: None, lambda: None, alone=False)
    limited._profile(ProfileReq(req_type=ProfileReqType.START_PROFILE))
    profiler.fault = OSError("no space left on device")
    limited._profile_batch_predicate(None)
    assert not profiler.profile_in_progress
