"""The bytes of resident and of streamed weights, for experts that are stacked in a checkpoint and have biases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sgl_batch.checkpoint.files import StoredTensor
from sgl_batch.checkpoint.quantised import GroupedBits
from sgl_batch.checkpoint.tensors import ModelTensor
from sgl_batch.config import from_mapping
from sgl_batch.core.supported_models import CPU
from sgl_batch.planner.needs import Model, Target, fit

LAYERS, EXPERTS, HIDDEN, INTER, THREADS = 3, 4, 64, 32, 5
OTHERS = 10 * HIDDEN * 2
BIASES = LAYERS * EXPERTS * (2 * INTER + HIDDEN) * 4
NUMBERS, OUTPUTS = 3 * HIDDEN * INTER, 2 * INTER + HIDDEN  # of one expert
CONFIG = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "intermediate_size": INTER,
    "vocab_size": 1000,
}


def tensor(name: str, *shape: int) -> ModelTensor:
    size = 2
    for number in shape:
        size *= number
    return ModelTensor(name, StoredTensor(Path("model.safetensors"), "BF16", shape, 0, size))


@pytest.fixture
def model() -> Model:
    tensors = [tensor("model.norm.weight", 10 * HIDDEN)]
    for layer in range(LAYERS):
        module = f"model.layers.{layer}.mlp.experts"
        tensors += [
            tensor(f"{module}.gate_up_proj", EXPERTS, HIDDEN, 2 * INTER),
            tensor(f"{module}.gate_up_proj_bias", EXPERTS, 2 * INTER),
            tensor(f"{module}.down_proj", EXPERTS, INTER, HIDDEN),
            tensor(f"{module}.down_proj_bias", EXPERTS, HIDDEN),
        ]
    return Model(config=CONFIG, tensors=tensors, dtype="bfloat16")


@pytest.mark.parametrize(("int8", "expert"), [(False, 2 * NUMBERS), (True, NUMBERS + 4 * OUTPUTS)])
def test_biases_are_experts_weights_in_float32_and_are_not_streamed(model: Model, int8: bool, expert: int) -> None:
    found = model.weight_bytes(int8=int8)
    assert found.streamable == LAYERS * EXPERTS * expert
    assert found.experts == found.streamable + BIASES
    assert found.all == found.experts + OTHERS


@pytest.mark.parametrize(
    ("flags", "ranks", "expected"),
    [
        ({}, 1, LAYERS * EXPERTS * 2 * NUMBERS + BIASES),
        ({"weights": "streamed"}, 1, 2 * EXPERTS * 2 * NUMBERS + BIASES),
        ({"weights": "streamed"}, 2, EXPERTS * 2 * NUMBERS + BIASES // 2),
        ({"weights": "streamed", "weight_memory": 12345}, 1, 12345 + BIASES),
        (
            {"weights": "streamed", "cpu_weight_dtype": "int8", "weight_read_threads": THREADS},
            1,
            2 * EXPERTS * (NUMBERS + 4 * OUTPUTS) + BIASES + THREADS * 2 * 2 * HIDDEN * INTER,
        ),
    ],
    ids=["resident", "two layers", "two layers of a rank", "weight memory", "int8 and what rounding takes"],
)
def test_a_device_holds_slots_for_two_layers_and_all_biases(
    model: Model, flags: dict[str, object], ranks: int, expected: int
) -> None:
    target = Target(device=CPU, budget=8 << 30, page_size=64, length=128, ranks=ranks)
    assert fit(model, from_mapping(flags), target).uses["weights"] == OTHERS + expected


@pytest.mark.parametrize(
    ("ranks", "bits", "linear"),
    [(1, 4, 64 * 64 // 2 + 2 * 64 * 4), (1, 8, 64 * 64 + 2 * 64 * 4), (2, 4, 64 * 64 * 2), (2, 8, 64 * 64 * 2)],
)
def test_a_linear_layer_has_4_or_8_bits_where_ranks_do_not_share_it(
    model: Model, ranks: int, bits: int, linear: int
) -> None:
    small = ModelTensor("model.layers.0.o_proj.weight", tensor("", 64, 64).stored, GroupedBits(bits, 32, 4))
    target = Target(device=CPU, budget=8 << 30, page_size=64, length=128, ranks=ranks)
    config = from_mapping({})
    more = replace(model, tensors=[*model.tensors, small])
    assert fit(more, config, target).uses["weights"] - fit(model, config, target).uses["weights"] == linear
