"""New weights from disk reach the whole model and its reported experts, in the families other than the first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import FAMILIES, Prompts
from .paused_runs import LONG, load_from, trained_copy
from .whole_sequences import WholeSequences

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_tokens_and_reported_experts_are_those_of_the_weights_loaded_last(
    family: str,
    tmp_path: Path,
    model_path: Callable[[str], str],
    batch_engine: Callable[..., Any],
    prompts: Prompts,
) -> None:
    trained = trained_copy(model_path(family), tmp_path / family)
    input_ids = prompts.input_ids[3::3]
    engine = batch_engine(family, 7, enable_return_routed_experts=True)
    requests = {"input_ids": input_ids, "sampling_params": LONG, "return_routed_experts": True}
    for path in (str(trained), model_path(family)):
        engine.loop.run_until_complete(load_from(engine, path))
        whole_sequences = WholeSequences(path)
        for ids, answer in zip(input_ids, engine.generate(**requests), strict=True):
            assert "routed_experts" in answer["meta_info"]
            whole_sequences.check(ids, answer)
