"""The fitted forms: sizes between those measured, what is told apart, and profiles that lack something."""

from __future__ import annotations

from dataclasses import replace

import made_profiles as made
import pytest

from sgl_batch.errors import ConfigError
from sgl_batch.planner.cost_model import fit, fit_attention, fixed_pass_s
from sgl_batch.planner.model_layers import DENSE, MOE
from sgl_batch.planner.roofline import Knots, fit_roofline


@pytest.fixture(scope="module")
def costs():
    return fit(made.profile(), made.layers())


@pytest.mark.parametrize("rows", [3, 24, 100, 700])
def test_sizes_between_those_measured_are_within_a_tenth(costs, rows):
    looked_at = rows * 300
    assert costs.experts[MOE].at(rows) == pytest.approx(made.experts_s(rows), rel=0.1)
    assert costs.router[MOE].at(rows) == pytest.approx(made.router_s(rows), rel=0.1)
    assert costs.decode_attention.at(rows, looked_at) == pytest.approx(made.attention_s(rows, looked_at), rel=0.1)
    assert costs.step.decode.at(rows) == pytest.approx(made.step_s(rows), rel=0.1)


def test_beyond_the_largest_size_seconds_go_on_in_a_straight_line(costs):
    assert costs.experts[MOE].at(8192) == pytest.approx(made.experts_s(8192), rel=0.01)
    assert costs.step.decode.at(700) == pytest.approx(made.step_s(700), rel=0.01)


def test_no_rows_take_no_time(costs):
    assert costs.experts[MOE].at(0) == costs.decode_attention.at(0, 0) == 0


def test_the_cost_of_a_pass_is_told_apart_from_that_of_a_layer(costs):
    assert costs.pass_s == pytest.approx(made.PASS_S, rel=0.01)
    assert fixed_pass_s([made.sample(decode=True, sequences=4, tokens=32, count=2)]) == 0


def test_intake_has_a_cost_of_a_group_and_one_of_a_sequence(costs):
    assert costs.step.sequence_s == pytest.approx(made.SEQUENCE_S, rel=0.01)
    assert costs.step.group_s == pytest.approx(made.GROUP_S, rel=0.01)


def test_attention_of_rows_and_of_context_are_told_apart():
    found = fit_attention(
        [(8.0, looked, made.attention_s(8, looked)) for looked in (256, 8192)], lambda _: 1.0, lambda rows: rows
    )
    assert found.slope.at(8) == pytest.approx(3e-9, rel=0.01)
    assert found.at(8, 0) == pytest.approx(made.attention_s(8, 0), rel=0.01)


def test_context_whose_effect_noise_hides_costs_nothing():
    found = fit_attention([(8.0, 256.0, 0.002), (8.0, 8192.0, 0.0019)], lambda _: 1.0, lambda rows: rows)
    assert found.at(8, 1e6) == pytest.approx(0.00195, rel=0.1)


def test_knots_are_straight_on_logarithmic_axes_and_constant_outside():
    knots = Knots(((1.0, 1.0), (100.0, 0.01)))
    assert knots.at(10) == pytest.approx(0.1)
    assert (knots.at(0.5), knots.at(1000)) == (1.0, 0.01)


def test_samples_of_one_size_count_once():
    found = fit_roofline([(1.0, 0.1), (1.0, 0.3), (2.0, 0.2)], lambda _: 1.0, lambda rows: rows)
    assert found.at(1) == pytest.approx(0.2)


def test_a_profile_without_an_engines_steps_takes_those_of_passes():
    assert fit(made.profile(steps=False), made.layers()).step.decode.at(64) == pytest.approx(0.001)


def test_a_profile_of_one_phase_is_refused():
    whole = made.profile(DENSE)
    decode = replace(whole, passes=tuple(one for one in whole.passes if one.decode))
    with pytest.raises(ConfigError, match="no prefill group"):
        fit(decode, made.layers(DENSE))


def test_layers_that_the_cut_model_lacks_add_what_each_takes_outside_its_parts():
    profile, layers = made.profile(), made.layers()
    passes = tuple(replace(one, rest_s=0.001 + 0.0002 * one.layers) for one in profile.passes)
    found = fit(replace(profile, passes=passes), layers)
    assert found.step.further_layers_s == pytest.approx(0.0002 * (layers.num_layers - 3))
    assert fit(profile, layers).step.further_layers_s == 0
