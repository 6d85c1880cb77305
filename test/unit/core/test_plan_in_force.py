"""The plan in force: fitted to the device, changed as a whole, and within the working memory of a budget."""

from __future__ import annotations

from typing import Any

import pytest

from sgl_batch.config import BatchConfig, from_mapping
from sgl_batch.core.plan_in_force import PlanInForce
from sgl_batch.errors import ConfigError

SIZES = {"b_attn_prefill": 128, "b_moe_prefill": 512, "b_attn_decode": 8, "b_moe_decode": 32}


def fitted(*, can_reenter: bool = True, max_running: int = 64, **flags: Any) -> PlanInForce:
    in_force = PlanInForce(from_mapping({**SIZES, **flags}))
    in_force.fit(page_size=8, max_running=max_running, can_reenter=can_reenter)
    return in_force


def change(in_force: PlanInForce, **changes: Any) -> None:
    in_force.apply(in_force.prepare(changes))


def test_there_is_no_plan_before_the_device_is_known() -> None:
    with pytest.raises(AssertionError, match="when the device is known"):
        _ = PlanInForce(BatchConfig()).plan


def test_a_plan_is_fitted_again_when_more_is_known_of_the_device() -> None:
    in_force = fitted(max_running=64)
    assert in_force.plan.decode.b_moe == 32
    assert in_force.fit(page_size=8, max_running=20, can_reenter=True) is in_force.plan
    assert in_force.plan.decode.b_moe == 20


def test_groups_that_are_one_sub_batch_stay_so_when_they_grow() -> None:
    in_force = PlanInForce(from_mapping({"b_moe_decode": 300}))
    in_force.fit(page_size=8, max_running=1000, can_reenter=True, whole_groups=True)
    assert in_force.plan.decode.b_attn == 300
    change(in_force, b_moe_decode=900)
    assert in_force.plan.decode.b_attn == 900


@pytest.mark.parametrize("can_reenter", [True, False])
def test_prompts_share_prefixes_only_if_attention_can_reenter(can_reenter: bool) -> None:
    in_force = fitted(can_reenter=can_reenter)
    assert in_force.plan.share_prefixes is can_reenter
    change(in_force, share_prefixes=False)
    assert not in_force.plan.share_prefixes
    change(in_force, share_prefixes=True)
    assert in_force.plan.share_prefixes is can_reenter


def test_a_prepared_change_is_in_force_once_applied_and_builds_on_earlier_ones() -> None:
    in_force = fitted()
    first = in_force.prepare({"b_moe_decode": 16})
    second = in_force.prepare({"boundary_tokens": 5})
    assert (in_force.plan.decode.b_moe, in_force.config.schedule.boundary_tokens) == (32, 64)
    in_force.apply(first)
    assert (in_force.plan.decode.b_moe, in_force.plan.boundary_tokens) == (16, 64)
    in_force.apply(second)
    assert (in_force.plan.decode.b_moe, in_force.plan.boundary_tokens) == (16, 5)
    assert in_force.config is second


@pytest.mark.parametrize("size", [*SIZES, "mix_prefill"])
def test_no_size_exceeds_the_reserved_working_memory(size: str) -> None:
    in_force = fitted(max_running=256, mix_prefill=16)
    in_force.reserve()
    before = in_force.plan
    limit = {**SIZES, "mix_prefill": 16}[size]
    message = rf"^{size} is {limit + 1}, .* working memory for {limit}, .*: give at most {limit}, or .*device-mem"
    with pytest.raises(ConfigError, match=message):
        in_force.prepare({size: limit + 1})
    assert in_force.plan is before
    change(in_force, **{size: limit})
    assert in_force.plan == before


def test_sizes_that_were_lowered_may_be_raised_again_and_the_longest_prompt_stays() -> None:
    in_force = fitted()
    assert in_force.most_prompt_tokens is None
    in_force.reserve()
    before = in_force.plan
    change(in_force, b_moe_prefill=64, b_attn_prefill=64)
    assert in_force.plan.prefill.b_moe == 64
    assert in_force.most_prompt_tokens == 512, "the reserved working memory stays"
    change(in_force, b_moe_prefill=512, b_attn_prefill=128)
    assert in_force.plan == before


def test_without_a_budget_sizes_are_free() -> None:
    in_force = fitted()
    change(in_force, b_moe_prefill=4096)
    assert in_force.plan.prefill.b_moe == 4096


@pytest.mark.parametrize(
    ("name", "value"),
    [("device_memory", 1 << 30), ("order", "longest-first"), ("expert_runner", "torch"), ("migration", "never")],
)
def test_options_that_an_engine_is_built_with_do_not_change_while_it_runs(name: str, value: Any) -> None:
    in_force = fitted()
    with pytest.raises(
        ConfigError, match=rf"^{name} is .* cannot become .* restart it with --{name.replace('_', '-')}"
    ):
        in_force.prepare({name: value})
    change(in_force, boundary_tokens=7)
    assert in_force.plan.boundary_tokens == 7


@pytest.mark.parametrize(
    ("can_reenter", "changes", "words"),
    [
        (True, {"mix_prefill": 7}, r"mix_prefill is 7, less than a page \(8 tokens\)"),
        (False, {"mix_prefill": 8}, "the attention backend cannot hold the plans of decode rows and prompts"),
    ],
)
def test_impossible_mixing_is_refused_before_anything_changes(
    can_reenter: bool, changes: dict[str, Any], words: str
) -> None:
    in_force = fitted(can_reenter=can_reenter)
    before = in_force.plan
    with pytest.raises(ConfigError, match=words):
        in_force.prepare(changes)
    assert in_force.plan is before
    with pytest.raises(ConfigError, match=words):
        fitted(can_reenter=can_reenter, **changes)
