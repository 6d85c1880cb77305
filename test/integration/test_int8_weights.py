"""With int8 weights, tokens are those of the model with rounded weights, for all sizes of sub-batches."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sgl_batch_kernel
import torch
from safetensors.torch import load_file, save_file

from .conftest import FAMILIES, Prompts, greedy_reference
from .paused_runs import load_from, trained_copy
from .test_parity import generate
from .whole_sequences import WholeSequences

pytestmark = pytest.mark.engine

# Weights of projections and experts; not the router, nor latent attention's weight that is applied by head.
ROUNDED = re.compile(r"(?<!kv_b)_proj\.weight$|_proj_with_mqa\.weight$|\.w[123]\.weight$")
# Instruction sets on which rows stay in float32 with int8 weights, as Hugging Face's do.
FLOAT32_ROWS = [isa for isa in sgl_batch_kernel.runnable_isas() if "bf16" not in isa]


def rounded_checkpoint(source: Path, target: Path) -> Path:
    """Return a copy of the checkpoint with each weight of `ROUNDED` rounded to one of 255 values per output."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    names = [name for name in tensors if ROUNDED.search(name)]
    assert len(names) > 10
    for name in names:
        weight = tensors[name].float()
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        tensors[name] = (weight / scale).round().clamp(-127, 127) * scale
    save_file(
        {name: tensor.float() for name, tensor in tensors.items()}, target / "model.safetensors", {"format": "pt"}
    )
    return target


@pytest.mark.parametrize("family", [FAMILIES[0], FAMILIES[2]])
def test_float32_greedy_tokens_equal_huggingface_with_rounded_weights_before_and_after_updates(
    family: str,
    tmp_path: Path,
    model_path: Callable[[str], str],
    batch_engine: Callable[..., Any],
    prompts: Prompts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounded = rounded_checkpoint(Path(model_path(family)), tmp_path / family)
    expected = greedy_reference(str(rounded), torch.float32, prompts).tokens
    monkeypatch.setenv("SGL_BATCH_ISA", FLOAT32_ROWS[0])
    engine = batch_engine(family, 7, cpu_weight_dtype="int8")
    assert engine.plan_manifest()["flags"]["cpu_weight_dtype"] == "int8"
    assert generate(engine, prompts) == expected
    trained = trained_copy(model_path(family), tmp_path / "trained")
    engine.loop.run_until_complete(load_from(engine, trained))
    whole_sequences = WholeSequences(str(rounded_checkpoint(trained, tmp_path / "rounded")))
    requests = {"input_ids": prompts.input_ids, "sampling_params": prompts.sampling_params}
    for ids, answer in zip(prompts.input_ids, engine.generate(**requests), strict=True):
        whole_sequences.check(ids, answer)
    engine.loop.run_until_complete(load_from(engine, model_path(family)))
    assert generate(engine, prompts) == expected


def test_bfloat16_tokens_with_int8_weights_do_not_depend_on_sub_batches(
    batch_engine: Callable[..., Any], prompts: Prompts
) -> None:
    settings = {"dtype": "bfloat16", "cpu_weight_dtype": "int8"}
    expected = generate(batch_engine(FAMILIES[0], 7, **settings), prompts)
    assert generate(batch_engine(FAMILIES[0], 1, **settings), prompts) == expected
    assert generate(batch_engine(FAMILIES[0], 7, dtype="bfloat16"), prompts) != expected, "rounding changes some token"
