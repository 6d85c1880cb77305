"""With int8 activations, tokens are those of the model with weights and rows rounded alike, whatever runs together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .conftest import FAMILIES, Prompts
from .int8_products import int8_products
from .test_parity import generate
from .whole_sequences import WholeSequences

pytestmark = pytest.mark.engine

INT8 = {"cpu_weight_dtype": "int8", "cpu_activations": "int8"}


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_float32_greedy_tokens_equal_huggingface_with_rounded_rows_and_weights(
    family: str, model_path: Callable[[str], str], batch_engine: Callable[..., Any], prompts: Prompts
) -> None:
    engine = batch_engine(family, 7, **INT8)
    assert engine.plan_manifest()["flags"]["cpu_activations"] == "int8"
    whole_sequences = WholeSequences(model_path(family), experts_implementation="eager")
    requests = {"input_ids": prompts.input_ids, "sampling_params": prompts.sampling_params}
    with int8_products(*whole_sequences.router_and_head_outputs):
        for ids, answer in zip(prompts.input_ids, engine.generate(**requests), strict=True):
            whole_sequences.check(ids, answer)


def test_bfloat16_tokens_with_int8_activations_do_not_depend_on_sub_batches(
    batch_engine: Callable[..., Any], prompts: Prompts
) -> None:
    settings = {"dtype": "bfloat16", **INT8}
    expected = generate(batch_engine(FAMILIES[2], 7, **settings), prompts)
    assert generate(batch_engine(FAMILIES[2], 1, **settings), prompts) == expected
    rounded_weights = batch_engine(FAMILIES[2], 7, dtype="bfloat16", cpu_weight_dtype="int8")
    assert generate(rounded_weights, prompts) != expected, "rounding rows changes some token"
