"""Choices that a start makes by the times of decode steps, and how those of an earlier start are read."""

from __future__ import annotations

import json

import pytest

from sgl_batch.core.start_choices import (
    OFF,
    ON,
    PER_INTERVAL,
    RESIDENT,
    Choice,
    StartChoices,
    choose_decode_kv,
    choose_overlap,
    earlier_choices,
    line_of,
    taken_over,
)
from sgl_batch.errors import ConfigError

KEPT = Choice(mode="x", why="x: faster", numbers={"x": (0.5, 0.25)})
CHOICES = StartChoices(decode_forward=KEPT, expert_runner=KEPT, attention=KEPT, overlap=KEPT, decode_kv=KEPT)


@pytest.mark.parametrize(("host_ms", "mode"), [(1.0, ON), (9.5, ON), (9.6, OFF), (10.0, OFF)])
def test_overlap_is_on_if_five_per_cent_of_a_step_can_hide_work(host_ms, mode):
    choice = choose_overlap(0.010, host_ms / 1e3)
    assert choice.mode == mode
    assert choice.why.startswith(f"{mode}: the host has launched a step of 10.00 ms after {host_ms:.2f} ms, and ")
    assert choice.numbers == {"step": (0.010,), "host": (host_ms / 1e3,)}


def test_overlap_is_off_without_a_measurement_or_with_an_obstacle():
    assert choose_overlap(None, None).why == "off: no decode step was measured"
    assert choose_overlap(0.010, 0.001, obstacle="several ranks").why == "off: several ranks"


@pytest.mark.parametrize(("pool_bytes", "mode"), [(95 << 20, PER_INTERVAL), (96 << 20, RESIDENT), (64 << 30, RESIDENT)])
def test_streamed_decode_is_tried_if_copies_bring_the_devices_pages_within_a_step(pool_bytes, mode):
    choice = choose_decode_kv(0.010, (100 << 20) * 100, pool_bytes)
    assert choice.mode == mode
    assert choice.numbers["bytes of pages"] == (pool_bytes,)


def test_the_reason_for_a_mode_of_decode_kv_has_the_numbers():
    choice = choose_decode_kv(0.020, 50e9, 100_000_000_000)
    assert choice.why == (
        "resident: 50.0 GB/s from the host bring 1.0% of the device's pages in a step of 20.00 ms, and streaming pays "
        "only where they bring all"
    )


def test_earlier_choices_are_read_back_and_marked_once():
    read = earlier_choices(json.dumps(CHOICES.as_dict()))
    assert read == dict.fromkeys(CHOICES.as_dict(), KEPT)
    again = taken_over(taken_over(KEPT))
    assert (again.mode, again.why, again.numbers) == ("x", "x: faster (settled at an earlier start)", KEPT.numbers)
    assert earlier_choices(None) == {}
    assert line_of(CHOICES.as_dict()).startswith("decode forward x, expert runner x, attention x, ")


@pytest.mark.parametrize("text", ["", "[1]", "3", '{"overlap": {"mode": "on"}}', '{"overlap": 1}'])
def test_text_without_choices_is_refused(text):
    with pytest.raises(ConfigError, match="start_choices does not hold the choices of an earlier start"):
        earlier_choices(text)
