"""A device's time by part is measured by events in some passes, without waits, and scaled to all."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import pytest

from sgl_batch.metrics import counters as module
from sgl_batch.metrics.counters import PARTS, PartClock
from sgl_batch.metrics.sampled_parts import DECODE, PREFILL, SAMPLE_EVERY, SAMPLING, SampledParts


@dataclass
class FakeEvent:
    """Happens when the device has reached `at_s`."""

    device: FakeDevice
    at_s: float

    def query(self) -> bool:
        return self.at_s <= self.device.reached_s

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert end_event.query(), "CUDA refuses the time to an event that has not happened"
        return 1e3 * (end_event.at_s - self.at_s)


class FakeDevice:
    """A stream: `given_s` is the time that all its work takes, `reached_s` how far it has come."""

    def __init__(self) -> None:
        self.given_s, self.reached_s, self.num_events = 0.0, 0.0, 0

    def record(self) -> FakeEvent:
        self.num_events += 1
        return FakeEvent(self, self.given_s)

    def catch_up(self) -> None:
        self.reached_s = self.given_s


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The host's clock in seconds, which the test sets."""
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


@pytest.fixture
def clock(device: FakeDevice, wall: list[float]) -> PartClock:
    return PartClock(SampledParts(device.record))


def run_pass(clock: PartClock, device: FakeDevice, kind: str = DECODE, *, slower: float = 2.0) -> None:
    """1 s of attention and 3 s of experts around 1 s of copies; kernel by kernel, `slower` times as long."""
    with clock.device_pass(kind):
        by = slower if clock.measures_parts else 1.0
        with clock.part("attention"):
            device.given_s += by
        with clock.part("experts"):
            device.given_s += by
            with clock.part("copies"):
                device.given_s += by
            device.given_s += 2 * by


def test_one_of_many_passes_is_measured_by_part_and_the_next_as_a_whole(clock: PartClock, device: FakeDevice) -> None:
    for _ in range(SAMPLE_EVERY - 1):
        run_pass(clock, device)
    assert device.num_events == 0
    run_pass(clock, device)
    assert device.num_events == 1 + 2 * 3 + 1, "begin, each switch of part, end"
    run_pass(clock, device)
    assert device.num_events == 8 + 2
    for _ in range(SAMPLE_EVERY - 2):
        run_pass(clock, device)
    assert device.num_events == 8 + 2


def test_a_whole_measured_pass_is_divided_by_the_shares_of_the_pass_before(
    clock: PartClock, device: FakeDevice, wall: list[float]
) -> None:
    for _ in range(SAMPLE_EVERY + 1):
        run_pass(clock, device)
    device.catch_up()
    wall[0] += 6 * SAMPLE_EVERY
    reading = clock.read()
    for part, seconds in {"attention": 1, "experts": 3, "copies": 1, "other": 1}.items():
        assert reading[part] == pytest.approx(seconds * SAMPLE_EVERY), part
    assert sum(reading.values()) == pytest.approx(wall[0] - 100)


def test_a_pass_slowed_by_a_capture_is_not_scaled_to_others(
    clock: PartClock, device: FakeDevice, wall: list[float]
) -> None:
    for _ in range(SAMPLE_EVERY):
        run_pass(clock, device, slower=1.0)
    with clock.device_pass(DECODE):
        device.given_s += 1000
    device.catch_up()
    wall[0] += 5 * SAMPLE_EVERY
    assert clock.read()["attention"] == pytest.approx(SAMPLE_EVERY)


def test_reading_never_waits_for_the_device(clock: PartClock, device: FakeDevice, wall: list[float]) -> None:
    run_pass(clock, device, PREFILL)
    wall[0] += 10
    assert clock.read() == {**dict.fromkeys(PARTS, 0.0), "other": 10.0}
    device.reached_s = device.given_s - 0.5
    assert clock.read()["experts"] == 0
    device.catch_up()
    reading = clock.read()
    assert reading["experts"] == pytest.approx(6.0)
    assert reading["other"] == 10.0, "a reading never goes back"
    wall[0] += 10
    assert sum(clock.read().values()) == pytest.approx(wall[0] - 100)


def test_every_prefill_is_measured_and_not_scaled(clock: PartClock, device: FakeDevice) -> None:
    for _ in range(3):
        run_pass(clock, device, PREFILL)
    device.catch_up()
    assert clock.read()["attention"] == pytest.approx(3 * 2.0)


def test_the_hosts_time_counts_to_parts_only_outside_passes(clock: PartClock, wall: list[float]) -> None:
    with clock.device_pass(SAMPLING), clock.part("sampling"):
        wall[0] += 1
        clock.shift(0.5, source="exchange", target="stall")
    with clock.part("boundary"):
        wall[0] += 2
    with clock.part("idle"):
        wall[0] += 4
    expected = {**dict.fromkeys(PARTS, 0.0), "boundary": 2.0, "idle": 4.0, "other": 1.0}
    assert clock.read() == expected


def test_a_failed_pass_is_not_measured(clock: PartClock, device: FakeDevice) -> None:
    with suppress(KeyError), clock.device_pass(PREFILL):
        device.given_s += 1
        raise KeyError
    run_pass(clock, device, PREFILL)
    device.catch_up()
    assert clock.read()["attention"] == pytest.approx(2.0)


def test_without_a_device_passes_are_the_hosts_time(wall: list[float]) -> None:
    clock = PartClock()
    with clock.device_pass(DECODE), clock.part("attention"):
        wall[0] += 3
        assert not clock.measures_parts
    assert clock.read() == {**dict.fromkeys(PARTS, 0.0), "attention": 3.0}
