"""What ranks keep for partitions: nothing where none can be, regions for each set, and partial sums of all ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from sequence_builders import plan

from sgl_batch.config import from_mapping
from sgl_batch.core.device_budget import DeviceNeeds, ModelShape, kv_bytes
from sgl_batch.core.partition_memory import (
    COLUMN_GATHER_BYTES,
    COLUMNS,
    GATHERS,
    SHARED_PASSES,
    gather_bytes,
    partition_reserves,
    shared_pass_bytes,
)
from sgl_batch.errors import ConfigError

MIB = 1 << 20
SHAPE = ModelShape(
    hidden=1024,
    vocabulary=32000,
    layers=12,
    attention_width=2560,
    experts=64,
    top_k=8,
    expert_width=384,
    dense_width=3072,
    item_bytes=2,
)
PLAN = plan(b_moe_prefill=8192, b_moe=256)
OFF = {"partition_costs": "off"}


def reserved(num_ranks: int = 2, **flags: Any) -> dict[str, int]:
    return partition_reserves(from_mapping(flags), PLAN, SHAPE, num_ranks=num_ranks)


@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [(1, {}), (2, OFF), (2, {"kv_store_bytes": 1 << 30, "decode_kv": "streamed"})],
    ids=["one rank", "off", "streamed KV"],
)
def test_nothing_is_kept_where_nothing_is_ever_partitioned(num_ranks: int, flags: dict[str, Any]) -> None:
    assert reserved(num_ranks, **flags) == {}


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"partition_costs": "measure"},
        {**OFF, "partition_prompt_tokens": 512},
        {**OFF, "partition_below": 4},
        {**OFF, "migration": "partition"},
        {**OFF, "on_long_tail": "module:name"},
    ],
)
def test_something_is_kept_where_anything_can_order_a_partition(flags: dict[str, Any]) -> None:
    found = reserved(**flags)
    assert set(found) == {GATHERS, SHARED_PASSES}
    assert min(found.values()) > 0


def test_a_rank_maps_the_regions_of_each_set_that_it_can_belong_to() -> None:
    config, small = from_mapping({}), from_mapping({"partition_below": 4})
    sets = [gather_bytes(config, num_ranks=ranks) // COLUMN_GATHER_BYTES for ranks in (2, 4, 8)]
    assert sets == [2, 4, 8], "by cost, all ranks are one set"
    sets = [gather_bytes(small, num_ranks=ranks) // COLUMN_GATHER_BYTES for ranks in (2, 4, 6)]
    assert sets == [2, 4 + 2, 6 + 3 + 2], "by limits, equal parts of them too"


def test_split_experts_take_as_much_again_as_a_rank_s_own() -> None:
    expert = 3 * SHAPE.hidden * SHAPE.expert_width * SHAPE.item_bytes
    found = [reserved(ranks, partition_experts="split")[COLUMNS] for ranks in (2, 4)]
    assert found == [SHAPE.layers * 32 * expert, SHAPE.layers * 16 * expert]
    dense = dataclasses.replace(SHAPE, experts=0)
    assert COLUMNS not in partition_reserves(from_mapping({"partition_experts": "split"}), PLAN, dense, num_ranks=2)


def test_gathers_over_gloo_map_no_region() -> None:
    assert gather_bytes(from_mapping({"token_dispatcher": "gloo"}), num_ranks=2) == 0


def test_sums_grow_with_rows_and_of_all_ranks_there_are_those_of_few_rows_at_a_time() -> None:
    def sums(rows: int, num_ranks: int) -> int:
        return shared_pass_bytes(SHAPE, rows=rows, num_ranks=num_ranks)

    own = 4 * SHAPE.hidden
    assert 256 * own < sums(256, 2) < sums(256, 4)
    assert sums(8192, 2) == sums(8192, 4) == 8192 * own
    assert sums(8192, 64) < 8192 * own + 64 * 8192 * own / 8
    assert shared_pass_bytes(dataclasses.replace(SHAPE, experts=0), rows=8192, num_ranks=2) == 0


def test_without_shared_prompts_a_shared_pass_has_the_rows_of_a_decode_step() -> None:
    tail, prompts = reserved(**OFF, partition_below=4), reserved(**OFF, partition_prompt_tokens=512)
    assert tail[SHARED_PASSES] == shared_pass_bytes(SHAPE, rows=256, num_ranks=2)
    assert prompts[SHARED_PASSES] == shared_pass_bytes(SHAPE, rows=8192, num_ranks=2)


def test_pages_get_less_and_a_budget_that_is_too_small_names_partitions() -> None:
    alone = DeviceNeeds(program=400 * MIB, weights=2000 * MIB, working=300 * MIB, page=MIB)
    together = dataclasses.replace(alone, reserves=reserved())
    small = plan(b_moe=8)
    assert kv_bytes(4000 * MIB, alone, small) - kv_bytes(4000 * MIB, together, small) == sum(reserved().values())
    with pytest.raises(ConfigError, match=r"program 400.00 MiB, gathers of partitions 32.00 MiB, passes that ranks sh"):
        kv_bytes(2750 * MIB, together, small)
