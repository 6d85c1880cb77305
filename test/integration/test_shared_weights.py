"""Ranks hold equal weights once until new ones come, and have one rank's tokens before and after that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import FAMILIES, Prompts
from .paused_runs import load_from, trained_copy
from .test_parity import generate
from .test_ranks import ranks, share_weights

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("family", "dtype", "dtype_of_ranks"), [(FAMILIES[0], "model", "lossless12"), (FAMILIES[2], "int8", "int8")]
)
def test_tokens_with_shared_weights_and_after_updates_are_those_of_one_rank(
    family: str,
    dtype: str,
    dtype_of_ranks: str,
    tmp_path: Path,
    model_path: Callable[[str], str],
    batch_engine: Callable[..., Any],
    prompts: Prompts,
) -> None:
    one = batch_engine(family, 7, dtype="bfloat16", cpu_weight_dtype=dtype)
    two = batch_engine(family, 7, dtype="bfloat16", cpu_weight_dtype=dtype_of_ranks, **ranks(2))
    first = generate(one, prompts)
    assert generate(two, prompts) == first
    assert share_weights(two)
    trained = trained_copy(model_path(family), tmp_path / family)
    for engine in (one, two):
        engine.loop.run_until_complete(load_from(engine, trained))
    assert not share_weights(two)
    updated = generate(one, prompts)
    assert updated != first
    assert generate(two, prompts) == updated
    for engine in (one, two):
        engine.loop.run_until_complete(load_from(engine, model_path(family)))
    assert generate(two, prompts) == first
