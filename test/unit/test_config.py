"""The configuration: keywords and flags have the same names, and values are checked when they are given."""

from __future__ import annotations

import argparse
import dataclasses
import json

import pytest

from sgl_batch.config import (
    BatchConfig,
    ForwardConfig,
    MemoryConfig,
    RankConfig,
    ScheduleConfig,
    TraceConfig,
    field_names,
    from_mapping,
    split_kwargs,
)
from sgl_batch.config_flags import add_cli_flags, from_args, given_in
from sgl_batch.errors import ConfigError

# A value other than the default for every option.
OTHER = {
    "b_attn_prefill": 5,
    "b_moe_prefill": 50,
    "b_attn_decode": 3,
    "b_moe_decode": 30,
    "accumulate": False,
    "expert_runner": "torch",
    "decode_forward": "eager",
    "start_choices": "{}",
    "decode_graph_memory": 2 << 30,
    "cpu_weight_dtype": "int8",
    "cpu_activations": "int8",
    "on_yield": "callbacks:round_kv",
    "weights": "streamed",
    "weight_memory": 1 << 30,
    "weight_read_threads": 2,
    "kv_store_bytes": 1 << 30,
    "kv_store_dir": "store",
    "kv_store_mode": "inclusive",
    "decode_kv": "streamed",
    "kv_store_checksums": True,
    "kv_copy_threads": 2,
    "device_memory": 3 << 30,
    "host_memory": 2 << 30,
    "boundary_tokens": 7,
    "refill_watermark": 0.5,
    "ready_ahead": 2.0,
    "share_prefixes": False,
    "mix_prefill": 64,
    "speculate": "4",
    "drafter": "drafts:of_corpus",
    "overlap": "on",
    "plan": "off",
    "workload": "64:32x8",
    "order": "longest-first",
    "admission": "forecast",
    "trace_file": "trace.jsonl",
    "log_startup": True,
    "migration": "never",
    "partition_below": 3,
    "partition_costs": "off",
    "partition_experts": "split",
    "partition_least_tokens": 100,
    "partition_prompt_tokens": 4096,
    "on_refill": "callbacks:fill",
    "on_long_tail": "callbacks:level",
    "token_dispatcher": "gloo",
    "rank_timeout_s": 30.0,
}
# Values that can be combined: mixing needs accumulation, and neither it nor drafting goes with overlap.
TOGETHER = {**OTHER, "mix_prefill": 0, "overlap": "off"}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    add_cli_flags(made)
    return made


def flags_of(values) -> list[str]:
    flags = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def test_every_option_has_another_value_in_these_tests():
    assert set(OTHER) == field_names()
    assert all(BatchConfig().flat()[name] != value for name, value in OTHER.items())


def test_no_flags_give_the_defaults():
    assert from_args(parser().parse_args([])) == BatchConfig() == from_mapping({})


def test_every_option_can_be_set_by_its_flag_and_by_its_name():
    by_flags = from_args(parser().parse_args(flags_of(TOGETHER)))
    assert by_flags == from_mapping(TOGETHER)
    assert by_flags.flat() == TOGETHER


def test_every_option_reaches_its_owner():
    assert from_mapping(TOGETHER) == BatchConfig(
        forward=ForwardConfig(
            b_attn_prefill=5,
            b_moe_prefill=50,
            b_attn_decode=3,
            b_moe_decode=30,
            accumulate=False,
            expert_runner="torch",
            decode_forward="eager",
            start_choices="{}",
            decode_graph_memory=2 << 30,
            cpu_weight_dtype="int8",
            cpu_activations="int8",
            on_yield="callbacks:round_kv",
        ),
        memory=MemoryConfig(
            weights="streamed",
            weight_memory=1 << 30,
            weight_read_threads=2,
            kv_store_bytes=1 << 30,
            kv_store_dir="store",
            kv_store_mode="inclusive",
            decode_kv="streamed",
            kv_store_checksums=True,
            kv_copy_threads=2,
            device_memory=3 << 30,
            host_memory=2 << 30,
        ),
        schedule=ScheduleConfig(
            boundary_tokens=7,
            refill_watermark=0.5,
            ready_ahead=2.0,
            order="longest-first",
            admission="forecast",
            share_prefixes=False,
            speculate="4",
            drafter="drafts:of_corpus",
            overlap="off",
            plan="off",
            workload="64:32x8",
        ),
        ranks=RankConfig(
            migration="never",
            partition_below=3,
            partition_costs="off",
            partition_experts="split",
            partition_least_tokens=100,
            partition_prompt_tokens=4096,
            on_refill="callbacks:fill",
            on_long_tail="callbacks:level",
            token_dispatcher="gloo",
            rank_timeout_s=30.0,
        ),
        trace=TraceConfig(trace_file="trace.jsonl", log_startup=True),
    )


@pytest.mark.parametrize("name", sorted(OTHER))
def test_an_option_alone_leaves_the_others_at_their_defaults(name):
    if name == "b_moe_prefill":
        assert OTHER[name] < BatchConfig().forward.b_attn_prefill, "also below a default b_attn"
    alone = {name: OTHER[name]}
    assert from_mapping(alone).flat() == {**BatchConfig().flat(), **alone}
    assert from_args(parser().parse_args(flags_of(alone))) == from_mapping(alone)


def test_a_manifest_can_repeat_the_configuration():
    config = from_mapping(TOGETHER)
    assert from_mapping(json.loads(json.dumps(config.flat()))) == config


def test_help_shows_every_flag_under_its_owner_with_its_default():
    text = " ".join(parser().format_help().split())
    for title in ("sgl_batch: forward pass", "sgl_batch: scheduling"):
        assert title in text
    for name, default in BatchConfig().flat().items():
        assert f"--{name.replace('_', '-')}" in text
        assert default is None or f"(default: {default})" in text


def test_an_unknown_option_is_refused_with_those_that_are_known():
    with pytest.raises(ConfigError, match=r"unknown option 'b_atn_decode'; known: accumulate, admission, .*"):
        from_mapping({"b_atn_decode": 3})


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("b_attn_prefill", 0, "at least 1"),
        ("b_moe_prefill", -1, "at least 1"),
        ("b_attn_decode", -1, "at least 0"),
        ("b_moe_decode", 0, "at least 1"),
        ("boundary_tokens", 0, "at least 1"),
        ("refill_watermark", -0.1, "at least 0.0 and at most 1.0"),
        ("refill_watermark", 1.1, "at least 0.0 and at most 1.0"),
        ("ready_ahead", float("inf"), "at least 0.0 and at most 16.0"),
        ("refill_watermark", float("nan"), "at least 0.0 and at most 1.0"),
        ("ready_ahead", float("nan"), "at least 0.0 and at most 16.0"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_range(name, value, limit):
    with pytest.raises(ConfigError, match=f"^{name} is {value}; it must be {limit}$"):
        from_mapping({name: value})


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("b_moe_decode", "8", "int"),
        ("b_moe_decode", 8.0, "int"),
        ("b_moe_decode", True, "int"),
        ("b_moe_decode", None, "int"),
        ("accumulate", 1, "bool"),
        ("accumulate", "no", "bool"),
        ("share_prefixes", None, "bool"),
        ("refill_watermark", "0.5", "float"),
        ("ready_ahead", True, "float"),
        ("trace_file", 3, "str"),
        ("migration", 3, "str"),
    ],
)
def test_a_value_of_another_type_is_refused_with_the_type(name, value, kind):
    with pytest.raises(ConfigError, match=f"{name} is {value!r}; it takes a value of type {kind}"):
        from_mapping({name: value})


@pytest.mark.parametrize(("name", "value"), [("refill_watermark", 1), ("ready_ahead", 0), ("trace_file", None)])
def test_a_share_may_be_an_integer_and_a_file_name_none(name, value):
    assert from_mapping({name: value}).flat()[name] == value


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_sub_batch_larger_than_its_group_is_refused(phase):
    with pytest.raises(ConfigError, match=f"b_attn_{phase} is 9, more than b_moe_{phase} \\(8\\)"):
        from_mapping({f"b_attn_{phase}": 9, f"b_moe_{phase}": 8})
    assert from_mapping({f"b_attn_{phase}": 8, f"b_moe_{phase}": 8})


@pytest.mark.parametrize("name", ["kv_store_bytes", "weight_memory", "device_memory", "host_memory"])
def test_a_size_is_a_number_or_text_by_its_flag_and_by_its_name(name):
    flag = f"--{name.replace('_', '-')}"
    for text, num_bytes in (("1.5GiB", 3 << 29), ("512M", 512 << 20), ("4096", 4096)):
        by_flag = from_args(parser().parse_args([flag, text]))
        assert by_flag.flat()[name] == from_mapping({name: text}).flat()[name] == num_bytes
        assert from_mapping({name: num_bytes}) == by_flag
    with pytest.raises(ConfigError, match=rf"^{name} is '8GB'; it takes a number of bytes, or one with K, M, G or T"):
        from_args(parser().parse_args([flag, "8GB"]))
    with pytest.raises(ConfigError, match=rf"^{name} is -1; it must be at least 0$"):
        from_mapping({name: "-1"})
    assert "powers of 1024" in parser().format_help()


def test_a_process_may_take_its_device_budget_and_a_store_in_memory():
    budget = {"device_memory": "2G", "kv_store_bytes": "1G"}
    assert from_mapping(budget).memory.process_bytes == 3 << 30
    assert from_mapping({**budget, "kv_store_dir": "d"}).memory.process_bytes == 2 << 30
    assert from_mapping({"kv_store_bytes": "1G"}).memory.process_bytes == 0


@pytest.mark.parametrize("value", ["", "0", "-1", "4.5", "on", "4 "])
def test_speculate_takes_a_word_or_a_number_of_drafts(value):
    with pytest.raises(ConfigError, match=f"^speculate is {value!r}; it takes auto, off, or a number of drafts"):
        from_mapping({"speculate": value})


def test_drafting_beside_overlap_is_refused():
    with pytest.raises(ConfigError, match=r"^speculate is auto and overlap is on: .* leave out overlap or speculate$"):
        from_mapping({"speculate": "auto", "overlap": "on"})


@pytest.mark.parametrize("option", ["on_yield", "drafter"])
@pytest.mark.parametrize("name", ["module", "module:", ":name", "module:two names", ""])
def test_a_function_is_named_by_its_module_and_its_own_name(option, name):
    with pytest.raises(ConfigError, match=f"^{option} is '{name}'; it takes module:name, as in "):
        from_mapping({option: name})


def test_keywords_are_split_into_ours_and_sglangs():
    ours, rest = split_kwargs({"model_path": "m", "b_moe_decode": 30, "tp_size": 1, "accumulate": False})
    assert ours == from_mapping({"b_moe_decode": 30, "accumulate": False})
    assert rest == {"model_path": "m", "tp_size": 1}


def test_arguments_of_a_parser_without_our_flags_give_the_defaults():
    assert from_args(argparse.Namespace(model_path="m")) == BatchConfig()


def test_what_the_user_gave_is_known_also_where_it_is_the_default():
    args = parser().parse_args(["--b-moe-decode", "256", "--no-accumulate"])
    assert given_in(args) == {"b_moe_decode", "accumulate"}
    assert given_in(parser().parse_args([])) == frozenset()


def test_a_configuration_is_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        BatchConfig().forward.b_moe_decode = 3
