"""The self-check: each mode is measured within the budget, and a choice is cached as long as its key is the same."""

from __future__ import annotations

import dataclasses
import json
import logging

import pytest

from sgl_batch.core.decode_choice import COROUTINE, SGLANG, Measured, TimeUp
from sgl_batch.core.start_choices import Choice
from sgl_batch.model_executor.time_budget import TimeBudget
from sgl_batch.startup.choice_cache import ChoiceCache, ChoiceKey, model_hash, versions
from sgl_batch.startup.self_check import settle, settle_once

KEY = ChoiceKey(
    option="decode_forward",
    device="NVIDIA H200",
    model="ab12",
    versions={"torch": "2.11.0"},
    settings={"b_moe_decode": 256},
)
CHOICE = Choice(mode=SGLANG, why="sglang: faster", numbers={SGLANG: (0.001,), COROUTINE: (0.002,)})
MODES = (COROUTINE, SGLANG)


class ScriptedSteps:
    """Steps with given seconds by mode and round; running them advances the test's clock."""

    def __init__(self, takes_s=1.0, **seconds):
        self.now, self.takes_s, self.ran = 0.0, takes_s, []
        self._seconds = {name: iter(values) for name, values in seconds.items()}

    def run_steps(self, mode, time_is_up):
        self.ran.append(mode)
        for _ in range(4):
            if time_is_up():
                raise TimeUp
            self.now += self.takes_s / 4
        found = next(self._seconds[mode])
        if isinstance(found, Exception):
            raise found
        return Measured(seconds=(found,), tokens=(1, 2))

    def settle(self, budget_s=20.0, *, deterministic=False):
        return settle(MODES, self, TimeBudget(budget_s, lambda: self.now), deterministic=deterministic)


@pytest.fixture
def cache(tmp_path):
    return ChoiceCache(tmp_path / "choices")


def test_modes_are_measured_in_rounds_and_compared_by_their_fastest():
    steps = ScriptedSteps(coroutine=[3.0, 2.0, 5.0], sglang=[1.9, 1.95, 9.0])
    choice = steps.settle()
    assert steps.ran == [COROUTINE, SGLANG] * 3
    assert (choice.mode, choice.numbers) == (SGLANG, {COROUTINE: (2.0,), SGLANG: (1.9,)})


def test_measurements_end_when_the_time_is_up():
    steps = ScriptedSteps(takes_s=8.0, coroutine=[3.0] * 3, sglang=[1.0] * 3)
    assert steps.settle(budget_s=20.0).mode == SGLANG
    assert (steps.ran, steps.now) == ([COROUTINE, SGLANG, COROUTINE], 20.0)
    slow = ScriptedSteps(takes_s=16.0, coroutine=[3.0], sglang=[])
    assert slow.settle(budget_s=20.0).why.endswith("sglang was not measured: the time was up")
    slower = ScriptedSteps(takes_s=80.0)
    assert slower.settle(budget_s=20.0).why == "coroutine: nothing could be measured (the time was up)"
    assert slower.now == 20.0


def test_a_mode_that_raises_has_failed_with_one_line_and_is_not_tried_again(caplog):
    steps = ScriptedSteps(coroutine=[3.0] * 3, sglang=[RuntimeError("no kernel image\nmore")])
    with caplog.at_level(logging.WARNING):
        choice = steps.settle()
    assert (choice.mode, steps.ran.count(SGLANG)) == (COROUTINE, 1)
    assert choice.why.endswith("sglang failed: RuntimeError: no kernel image")
    assert [record.getMessage() for record in caplog.records] == [
        "decode groups are not computed in the mode 'sglang', which failed in the self-check: "
        "RuntimeError: no kernel image"
    ]


def test_the_deterministic_mode_measures_nothing():
    steps = ScriptedSteps()
    assert steps.settle(deterministic=True).mode == COROUTINE
    assert steps.ran == []


def test_a_choice_is_cached_for_its_key_only(cache):
    assert cache.find(KEY) is None
    cache.keep(KEY, CHOICE)
    found = cache.find(KEY)
    assert (found.mode, found.why, found.numbers[SGLANG]) == (SGLANG, CHOICE.why, (0.001,))
    for changed in (
        {"option": "expert_runner"},
        {"device": "NVIDIA A100"},
        {"model": "cd"},
        {"versions": {"torch": "2.13.0"}},
        {"settings": {"b_moe_decode": 512}},
    ):
        assert cache.find(dataclasses.replace(KEY, **changed)) is None
    assert [key for key, _ in cache.kept()] == [KEY]


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", json.dumps({"format": "another/1"}), '{"format": "sgl_batch.start_choice/1", "choice": 3}'],
)
def test_a_foreign_or_broken_file_gives_a_warning_and_a_new_measurement(cache, tmp_path, caplog, content):
    cache.keep(KEY, CHOICE)
    path = tmp_path / "choices" / KEY.file_name
    path.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert cache.find(KEY) is None
    assert f"{path} holds no choice" in caplog.text
    assert settle_once(cache, KEY, MODES.__contains__, lambda: CHOICE) is CHOICE
    assert cache.find(KEY).mode == SGLANG


def test_only_a_measured_choice_is_cached_and_one_of_a_mode_that_is_not_allowed_is_ignored(cache):
    unmeasured = Choice(mode=COROUTINE, why="nothing could be measured")
    assert settle_once(cache, KEY, MODES.__contains__, lambda: unmeasured) is unmeasured
    assert cache.find(KEY) is None
    assert settle_once(cache, KEY, MODES.__contains__, lambda: CHOICE) is CHOICE
    again = settle_once(cache, KEY, MODES.__contains__, lambda: pytest.fail("measured twice"))
    assert (again.mode, again.why) == (SGLANG, "sglang: faster (settled at an earlier start)")
    assert settle_once(cache, KEY, (COROUTINE,).__contains__, lambda: unmeasured) is unmeasured


def test_a_directory_that_cannot_be_written_only_disables_the_cache(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        ChoiceCache(tmp_path / "file").keep(KEY, CHOICE)
    assert "is not kept" in caplog.text


def test_the_key_has_the_models_configuration_and_versions(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    first = model_hash(str(tmp_path))
    (tmp_path / "config.json").write_text('{"layers": 2}')
    assert len({first, model_hash(str(tmp_path)), model_hash("org/name")}) == 3
    assert set(versions()) == {"sgl-batch", "sglang", "torch", "kernels"}


def test_all_self_checks_share_one_budget_of_time():
    now = 0.0
    budget = TimeBudget(20.0, lambda: now)
    with budget.spending(0.5) as time_is_up:
        now += 9.0
        assert not time_is_up()
        now += 1.0
        assert time_is_up()
    now += 100.0  # between two checks nothing is spent
    with budget.spending() as time_is_up:
        now += 9.9
        assert not time_is_up()
        now += 5.0
    with budget.spending() as time_is_up:
        assert time_is_up()
