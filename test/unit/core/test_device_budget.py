"""What a device budget leaves for KV pages, and when that is too little."""

from __future__ import annotations

import dataclasses

import pytest
from sequence_builders import plan

from sgl_batch.core.device_budget import DeviceNeeds, ModelShape, kv_bytes, working_bytes
from sgl_batch.errors import ConfigError

MIB = 1 << 20
NEEDS = DeviceNeeds(program=400 * MIB, weights=2000 * MIB, working=300 * MIB, page=MIB)
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


def working(shape: ModelShape = SHAPE, **changes: object) -> int:
    sizes = {"b_moe_prefill": 8192, "b_moe": 256, "page_size": 64}
    options = {"max_running": 512, "page_bytes": MIB, "staged": False, "by_torch": False, "num_ranks": 1}
    sizes |= {name: value for name, value in changes.items() if name in sizes}
    options |= {name: value for name, value in changes.items() if name in options}
    made = dataclasses.replace(plan(**sizes), mix_prefill=changes.get("mix_prefill", 0))
    return working_bytes(made, shape, **options)


def test_kv_pages_get_the_rest_of_the_budget():
    assert kv_bytes(2800 * MIB, NEEDS, plan(b_moe=8)) == 99 * MIB, "one page takes the writes of padding"


def test_two_pages_for_each_running_sequence_are_the_least():
    assert kv_bytes(2717 * MIB, NEEDS, plan(b_moe=8)) == 16 * MIB
    with pytest.raises(
        ConfigError,
        match=r"^device_memory is 2.65 GiB, and 2.65 GiB are needed: the program 400.00 MiB, weights "
        r"1.95 GiB, groups of 100 prompt tokens and their logits 300.00 MiB, and 2 pages of KV for each of 8 running "
        r"sequences 16.00 MiB; raise --device-memory, or lower --b-moe-decode to 7, --b-moe-prefill or "
        r"--max-running-requests$",
    ):
        kv_bytes(2716 * MIB, NEEDS, plan(b_moe=8))


def test_gpu_reserves_are_subtracted_and_listed():
    kept = dataclasses.replace(NEEDS, program=0, reserves={"CUDA's context": 300 * MIB, "decode graphs": 100 * MIB})
    assert kv_bytes(2800 * MIB, kept, plan(b_moe=8)) == 99 * MIB
    with pytest.raises(ConfigError, match=r"are needed: CUDA's context 300.00 MiB, decode graphs 100.00 MiB, weights"):
        kv_bytes(2716 * MIB, kept, plan(b_moe=8))


def test_a_budget_that_does_not_hold_the_weights_names_no_number_of_sequences():
    with pytest.raises(ConfigError, match=r"weights 1.95 GiB.* or lower --b-moe-decode, --b-moe-prefill"):
        kv_bytes(1000 * MIB, NEEDS, plan(b_moe=8))


@pytest.mark.parametrize(
    "more",
    [
        {"b_moe_prefill": 16384},
        {"mix_prefill": 8192},
        {"staged": True},
        {"by_torch": True},
        {"num_ranks": 4},
        {"shape": dataclasses.replace(SHAPE, hidden=2048)},
        {"shape": dataclasses.replace(SHAPE, vocabulary=150_000)},
        {"shape": dataclasses.replace(SHAPE, item_bytes=4)},
    ],
)
def test_larger_groups_layers_and_copies_of_rows_take_more_working_memory(more):
    assert working(**more) > working()


def test_staged_pages_are_those_of_two_layers_and_an_open_one_of_each_prompt():
    assert working(staged=True) - working() == 2 * (8192 // 64 + 512) * MIB // 12
