"""A model whose files are read past the page cache is the model whose files SGLang reads, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from sgl_batch.sglang_adapter.names import CPU_PLATFORM

from .conftest import FAMILIES

pytestmark = pytest.mark.engine


def load(model: str, way: str, directory: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("loading_process.py"), directory, model, way],
        env={**os.environ, "SGLANG_PLATFORM": CPU_PLATFORM},
        stdout=subprocess.PIPE,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def stored_bytes(model: str) -> int:
    total = 0
    for file in Path(model).glob("*.safetensors"):
        total += sum(tensor.nbytes for tensor in load_file(file).values())
    return total


@pytest.mark.parametrize("family", [FAMILIES[0], FAMILIES[2]])
def test_weights_read_past_the_page_cache_give_the_same_logits(
    family: str, model_path: Callable[[str], str], tmp_path: Path
) -> None:
    model = model_path(family)
    past, through = (load(model, way, tmp_path) for way in ("past", "through"))
    assert past["read"] == stored_bytes(model)
    assert through["read"] == 0
    assert past["logits"] == through["logits"]
    # What is left to the end are routers, the output projection, and what latent attention makes of its weights.
    while_loading, in_the_end = past["packed"]
    assert in_the_end / 2 < while_loading < in_the_end
    assert through["packed"] == past["packed"]
