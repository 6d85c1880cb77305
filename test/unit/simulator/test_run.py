"""Runs of policies on deployments: what they add up, what stands for what, and how far they depend on assumptions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sgl_batch.errors import ConfigError
from sgl_batch.planner.workload import Request, Workload
from sgl_batch.simulator.best import best_of
from sgl_batch.simulator.cluster.assumed import Assumed
from sgl_batch.simulator.cluster.deployment import feasible
from sgl_batch.simulator.cluster.hardware import cluster_named
from sgl_batch.simulator.cluster.models import model_named
from sgl_batch.simulator.intervals import Interval, interval_of, ratio_interval
from sgl_batch.simulator.lengths import are_alike, requests_like
from sgl_batch.simulator.policies import POLICIES, policies_named
from sgl_batch.simulator.run import Setup, Split, simulate

MODEL = "qwen3-30b-a3b"
ALIKE = requests_like(Workload(requests=[Request(600, 100)], count=96), 96)
SPREAD = requests_like(Workload(requests=[Request(600, 100)], count=96), 96, cv=0.5)


def setup(name: str, cluster: str, instances: int, *, tensor: bool = False) -> Setup:
    """Return a policy in the first regime of a layout with so many instances."""
    (policy,) = policies_named(name)
    found = feasible(MODEL, cluster, policy.engines[0])
    one = next(one for one in found if one.instances == instances and one.layout.tensor is tensor)
    return Setup(policy=policy, deployment=one, choice=policy.choices(one, 600.0, 700.0)[0])


@pytest.mark.parametrize("policy", [one for one in POLICIES if not one.units], ids=lambda one: one.name)
@pytest.mark.parametrize("requests", [ALIKE, SPREAD], ids=["alike", "spread"])
def test_every_policy_generates_all_tokens(policy, requests):
    result = simulate(setup(policy.name, "h100x1" if policy.engines[0].by_layer else "h100x2", 1), requests)
    assert result.counts.finished == len(requests)
    assert result.counts.output_tokens == requests.outputs.sum()
    assert result.counts.prompt_tokens == requests.prompts.sum()
    assert sum(result.parts.values()) == pytest.approx(result.seconds)
    assert 0 <= result.idle < 1


def test_alike_instances_are_simulated_once_and_others_each():
    one = setup("sglang", "h100x4", 4)
    alike, spread = simulate(one, ALIKE), simulate(one, SPREAD)
    assert (alike.simulated, alike.counts.output_tokens) == (1, ALIKE.outputs.sum())
    assert (spread.simulated, spread.counts.output_tokens) == (4, SPREAD.outputs.sum())
    assert "1 of 4 instances" in alike.notes[0]
    assert not spread.notes


def test_one_rank_stands_for_all_where_all_have_the_same_work():
    one = setup("sglang", "h100x4", 1)
    whole, collapsed = simulate(one, ALIKE), simulate(one, ALIKE, collapse=True)
    assert collapsed.seconds == pytest.approx(whole.seconds, rel=1e-6)
    assert collapsed.counts.finished == len(ALIKE)
    assert "one rank" in collapsed.notes[-1]
    # Where work differs, ranks wait for each other, which one rank does not show.
    assert simulate(one, SPREAD, collapse=True).seconds < simulate(one, SPREAD).seconds


def test_a_run_stops_at_its_time():
    one = setup("batchgen", "h100x1", 1)
    whole = simulate(one, SPREAD)
    half = simulate(one, SPREAD, until=whole.seconds / 2)
    assert half.seconds == pytest.approx(whole.seconds / 2, rel=0.2)
    assert half.counts.finished < len(SPREAD)


@pytest.mark.parametrize("requests", [ALIKE, SPREAD], ids=["alike", "spread"])
def test_units_finish_every_sequence_once(requests):
    one = replace(setup("disaggregated", "h100x2", 1), split=Split(prefill=1, decode=2))
    result = simulate(one, requests)
    assert result.counts.finished == len(requests)
    assert result.counts.output_tokens == requests.outputs.sum()
    assert result.counts.moved_tokens == requests.prompts[requests.outputs > 1].sum()
    assert result.instances == 3


def test_lengths_are_spread_about_their_means():
    spread = requests_like(Workload(requests=[Request(1000, 500)], count=1), 4000, cv=0.3)
    for values, mean in ((spread.prompts, 1000), (spread.outputs, 500)):
        assert values.mean() == pytest.approx(mean, rel=0.02)
        assert np.std(values) / mean == pytest.approx(0.3, rel=0.05)
    assert (spread.most == spread.outputs.max()).all()
    assert are_alike(ALIKE)
    assert not are_alike(spread)


def test_the_best_run_is_the_fastest_of_those_that_were_simulated():
    found = best_of(policies_named("batchgen")[0], model_named(MODEL), cluster_named("h100x2"), ALIKE)
    assert found.compared > len(found.others) > 0
    assert all(one.seconds >= found.result.seconds * 0.999 for one in found.others)


def test_every_way_to_compute_prompts_is_simulated_whole_where_lengths_differ():
    found = best_of(policies_named("sglang")[0], model_named(MODEL), cluster_named("h100x4"), SPREAD)
    kinds = [(one.setup.choice.chunk, one.setup.choice.together) for one in (found.result, *found.others)]
    whole = {kind for kind, one in zip(kinds, (found.result, *found.others), strict=True) if not one.collapsed}
    assert len(whole) > 2
    assert whole == set(kinds)


def test_every_ratio_of_units_is_in_the_table():
    found = best_of(policies_named("disaggregated:1")[0], model_named(MODEL), cluster_named("h100x4"), ALIKE)
    assert [one.setup.split for one in found.table] == [Split(prefill=n, decode=4 - n) for n in (1, 2, 3)]
    assert found.result.seconds == min(one.seconds for one in found.table)


def test_more_sequences_run_at_once_where_layers_keep_windows_alone():
    batch = requests_like(Workload(requests=[Request(2000, 200)], count=400), 400)
    found = []
    for policy in (policies_named("sglang")[0], policies_named("vllm")[0]):
        for keeps in (True, False):
            engines = tuple(replace(one, keeps_windows=keeps) for one in policy.engines)
            changed = replace(policy, engines=engines)
            found.append(best_of(changed, model_named("gpt-oss-120b"), cluster_named("h100x1"), batch).result)
    for all_tokens, windows in (found[:2], found[2:]):
        assert windows.counts.finished == all_tokens.counts.finished == 400
        assert windows.account.rows / windows.account.steps > 1.3 * all_tokens.account.rows / all_tokens.account.steps
        assert windows.seconds < all_tokens.seconds


def test_units_that_do_not_divide_the_cluster_are_refused():
    with pytest.raises(ConfigError, match="as in disaggregated:8"):
        best_of(policies_named("disaggregated:3")[0], model_named(MODEL), cluster_named("h100x4"), ALIKE)


def test_instances_have_as_many_gpus_as_a_policy_says():
    found = best_of(policies_named("sglang:2")[0], model_named(MODEL), cluster_named("h100x4"), ALIKE)
    assert {one.setup.deployment.layout.ranks for one in (found.result, *found.others)} == {2}


def test_a_model_that_fits_nowhere_is_refused():
    with pytest.raises(ConfigError, match="does not fit h100x1"):
        best_of(policies_named("sglang")[0], model_named("deepseek-r1"), cluster_named("h100x1"), ALIKE)


def test_unknown_policies_are_listed():
    assert [one.name for one in policies_named("offload, sglang,flexgen")][-1] == "sglang"
    with pytest.raises(ConfigError, match=r"no policy 'sglnag'.*batchgen"):
        policies_named("sglnag")


def test_an_interval_holds_the_time_and_names_what_moves_it():
    found = best_of(policies_named("sglang")[0], model_named(MODEL), cluster_named("h100x1"), ALIKE)
    interval = interval_of(found, ALIKE)
    assert interval.low < found.result.seconds < interval.high
    strongest = interval.strongest(3)
    assert len(strongest) == 3
    assert set(strongest) <= set(interval.known)


def test_an_end_that_leaves_less_memory_is_compared_with_as_many_sequences():
    found = best_of(policies_named("sglang")[0], model_named(MODEL), cluster_named("h100x1"), ALIKE)
    at_once = found.result.setup.deployment.running_tokens / 4000
    # With less memory, half of them would be enough to compare.
    many = requests_like(Workload(requests=[Request(3600, 400)], count=1), int(10 * at_once) - 1)
    assert interval_of(found, many).factors["reserve_bytes", "high"] > 0.98


def test_what_two_policies_assume_alike_cancels_in_their_ratio():
    alike, other = Assumed(1, 0.5, 2), Assumed(1, 0.8, 2)
    shared = Interval(low=1, high=4, factors={("a", "low"): 0.5, ("a", "high"): 2.0}, known={"a": alike})
    assert ratio_interval((2.0, shared), (4.0, shared)) == pytest.approx((2.0, 2.0))
    apart = replace(shared, known={"a": other})
    low, high = ratio_interval((2.0, shared), (4.0, apart))
    assert (low, high) == pytest.approx((2 * 2 ** -(2**0.5), 2 * 2 ** (2**0.5)))
