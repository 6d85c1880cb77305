"""Quantised checkpoints answer on a CPU as Hugging Face's model of their floats does."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sgl_batch import Engine
from sgl_batch.checkpoint.files import read_header
from sgl_batch.checkpoint.model_directory import form_of_weights
from sgl_batch.checkpoint.quantised import QuantisedMatrix, find_quantised
from sgl_batch.cli.models.check_command import check_command
from sgl_batch.errors import ConfigError
from sgl_batch.weights.dequantised import Dequantised
from tiny_models.quantised import quantise
from tiny_models.random_checkpoints import HUB, make_checkpoint
from tiny_models.random_families import FAMILIES as RANDOM_FAMILIES

from .conftest import FAMILIES, Prompts, Traces, greedy_reference
from .greedy_proof import check_greedy, make_requests
from .paused_runs import load_from
from .test_parity import generate
from .test_ranks import ranks

pytestmark = pytest.mark.engine

PAGE = 8
# Settings with which matrices have whole groups of 32 inputs, or of 128.
_IN_GROUPS = {
    "qwen2-moe": {"shared_expert_intermediate_size": 64},
    "kimi-k2": {"q_lora_rank": 64, "moe_intermediate_size": 64},
    "mistral": {"hidden_size": 128, "intermediate_size": 256},
}
# These choose experts, are multiplied head by head, or are one product with a matrix of floats.
_AS_FLOATS = re.compile(r"\.(gate|shared_expert_gate|kv_b_proj|q_a_proj)\.weight$")


def as_floats(path: Path, target: Path) -> Path:
    """Write the floats of a quantised checkpoint, as test_dequantised compares them with those of the form's makers."""
    form, file = form_of_weights(str(path)), path / "model.safetensors"
    assert form is not None
    shutil.copytree(path, target)
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    tensors = Dequantised(form, torch.float32)([str(file)], load_file(file).items())
    save_file({name: one.float().contiguous() for name, one in tensors}, target / "model.safetensors", {"format": "pt"})
    return target


def weight_bytes(engine: Any) -> int:
    held: int = engine.batch_stats()["memory"]["weight_bytes"]
    return held


def test_gpt_oss_of_mxfp4_has_the_tokens_of_its_floats_on_one_rank_and_on_two(
    tmp_path: Path, repo_root: Path, traces: Traces
) -> None:
    gpt_oss = next(family for family in RANDOM_FAMILIES if family.name == "gpt-oss")
    plain = make_checkpoint(gpt_oss, HUB, tmp_path, repo_root / "test/models/tiny-qwen3-moe")
    path = quantise(Path(plain), tmp_path / "quantised", "mxfp4")
    requests, floats = make_requests(PAGE), str(as_floats(path, tmp_path / "floats"))
    sizes: dict[str, Any] = {"dtype": "float32", "page_size": PAGE, "b_moe_prefill": 160, "b_moe_decode": 8}
    for num_ranks in (1, 2):
        engine = Engine(model_path=str(path), **sizes, **(ranks(2) if num_ranks == 2 else {}), **traces.new())
        try:
            made = engine.generate(input_ids=requests.input_ids, sampling_params=requests.sampling_params)
            check_greedy(floats, requests, [one["output_ids"] for one in made])
        finally:
            engine.shutdown()
    found = []
    for more in ({}, {"weights": "streamed"}, {"weights": "streamed", **ranks(2)}):
        engine = Engine(model_path=str(path), **{**sizes, "dtype": "bfloat16"}, **more)
        try:
            found.append(answers(engine))
        finally:
            engine.shutdown()
    assert found[1] == found[2] == found[0]


def test_tokens_are_those_of_the_floats_of_each_checkpoint_that_is_loaded(
    tmp_path: Path, model_path: Callable[[str], str], prompts: Prompts, started: Callable[..., Any]
) -> None:
    source = Path(model_path(FAMILIES[0]))
    expected, paths = {}, {}
    for form in ("fp8-blocks", "gptq-4-reordered"):
        paths[form] = str(quantise(source, tmp_path / form, form))
        floats = as_floats(Path(paths[form]), tmp_path / f"{form}-floats")
        expected[form] = greedy_reference(str(floats), torch.float32, prompts).tokens
    assert expected["fp8-blocks"] != expected["gptq-4-reordered"]
    engine = started(model_path=paths["fp8-blocks"], dtype="float32", page_size=16)
    assert generate(engine, prompts) == expected["fp8-blocks"]
    # New weights are taken back to floats by what their own config says.
    engine.loop.run_until_complete(load_from(engine, paths["gptq-4-reordered"]))
    assert generate(engine, prompts) == expected["gptq-4-reordered"]
    engine.loop.run_until_complete(load_from(engine, model_path(FAMILIES[0])))
    assert generate(engine, prompts) == greedy_reference(str(source), torch.float32, prompts).tokens


@pytest.mark.parametrize(
    ("form", "family", "of_32"),
    [
        ("mxfp4", "gpt-oss", 17),
        ("gptq-4", "qwen3-moe-dense-layers", 20),
        ("packed-4-zeros", "llama3", 20),
        ("awq", "qwen2-moe", 20),
        ("gptq-4", "kimi-k2", 20),
        ("fp8-blocks", "qwen3-moe-dense-layers", 36),
        ("fp8-rows", "mistral", 33),
        ("fp8-whole", "kimi-k2", 36),
        ("int8-rows", "mistral", 33),
    ],
)
def test_matrices_in_bfloat16_stay_in_4_or_8_bits_without_loss(
    form: str,
    family: str,
    of_32: int,
    tmp_path: Path,
    repo_root: Path,
    started: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain, path = quantised_family(form, family, tmp_path, repo_root)
    sizes: dict[str, Any] = {"dtype": "bfloat16", "page_size": PAGE, "b_moe_prefill": 160, "b_moe_decode": 8}
    small = started(model_path=str(path), **sizes)
    wide = started(model_path=str(path), cpu_weight_dtype="model", **sizes)
    expected = answers(wide)
    assert answers(small) == expected
    dummy = started(model_path=str(path), load_format="dummy", **sizes)
    assert weight_bytes(dummy) == weight_bytes(small), "profiles are of such models"
    saved = saved_bytes(path, of_32)
    assert weight_bytes(wide) - weight_bytes(small) == saved > 0
    said = []
    for weights in ("auto", "model"):
        capsys.readouterr()
        asked = [
            "--model",
            str(path),
            "--dtype",
            "bfloat16",
            "--device",
            "cpu",
            "--cpu-weight-dtype",
            weights,
            "--json",
        ]
        assert check_command(asked) == 0
        report = json.loads(capsys.readouterr().out)
        said.append(report["weight_bytes"])
        assert ("activations" in report) == (form == "int8-rows"), "of a model that was made for rows of int8"
    assert said[1] - said[0] == saved, "`sgl-batch check` knows it before"
    # Other weights of the same model have no such form; those that have it come back to it.
    small.loop.run_until_complete(load_from(small, plain))
    assert answers(small) != expected
    small.loop.run_until_complete(load_from(small, path))
    assert answers(small) == expected


def set_zero_point(tensors: dict[str, torch.Tensor], module: str) -> None:
    tensors[f"{module}.1.up_proj.qzeros"][0, 0] = -1  # one more than is stored is 16
    tensors[f"{module}.1.up_proj.qweight"][0, 0] = 0x76543210  # of the scale -16, and odd multiples


def widen_scale(tensors: dict[str, torch.Tensor], module: str) -> None:
    tensors[f"{module}.0.down_proj.weight_scale_inv"][0, 0] = 2.0**8


@pytest.mark.parametrize(
    ("form", "of_32", "without", "change"),
    [("gptq-4", 20, 36, set_zero_point), ("fp8-blocks", 36, 64, widen_scale)],  # these integers are numbers of fp8, too
)
def test_experts_of_which_one_is_not_of_their_form_are_loaded_as_other_weights(
    form: str,
    of_32: int,
    without: int,
    change: Callable[[dict[str, torch.Tensor], str], None],
    tmp_path: Path,
    repo_root: Path,
    started: Callable[..., Any],
) -> None:
    _, path = quantised_family(form, "qwen3-moe-dense-layers", tmp_path, repo_root)
    file = path / "model.safetensors"
    tensors = load_file(file)
    module = next(name for name in tensors if ".experts." in name).partition(".experts.")[0] + ".experts"
    change(tensors, module)
    save_file(tensors, file, {"format": "pt"})
    sizes: dict[str, Any] = {"dtype": "bfloat16", "page_size": PAGE, "b_moe_prefill": 160, "b_moe_decode": 8}
    small, wide = (started(model_path=str(path), cpu_weight_dtype=one, **sizes) for one in ("auto", "model"))
    assert answers(small) == answers(wide)
    in_floats = sum(math.prod(one.shape) for name, one in matrices_of(path).items() if name.startswith(f"{module}."))
    saved = saved_bytes(path, of_32) - in_floats // 32 * (without - of_32)
    assert weight_bytes(wide) - weight_bytes(small) == saved > 0


@pytest.mark.parametrize(
    ("form", "family", "of_32"), [("fp8-blocks", "qwen3-moe-dense-layers", 36), ("gptq-4", "kimi-k2", 20)]
)
def test_two_ranks_have_the_tokens_of_one_and_each_half_the_experts_in_4_or_8_bits(
    form: str, family: str, of_32: int, tmp_path: Path, repo_root: Path, started: Callable[..., Any]
) -> None:
    plain, path = quantised_family(form, family, tmp_path, repo_root)
    sizes: dict[str, Any] = {"dtype": "bfloat16", "page_size": PAGE, "b_moe_prefill": 160, "b_moe_decode": 8}
    one, two = started(model_path=str(path), **sizes), started(model_path=str(path), **sizes, **ranks(2))
    expected = answers(one)
    assert answers(two) == expected
    experts = sum(math.prod(one.shape) for name, one in matrices_of(path).items() if ".mlp.experts." in name)
    assert weight_bytes(one) - weight_bytes(two) == experts // 2 // 32 * of_32 > 0
    # Each rank takes a copy of what all share before others' weights come, and those of the form come back to it.
    for engine in (one, two):
        engine.loop.run_until_complete(load_from(engine, plain))
    other = answers(one)
    assert other != expected
    assert answers(two) == other
    two.loop.run_until_complete(load_from(two, path))
    assert answers(two) == expected


def quantised_family(form: str, family: str, target: Path, repo_root: Path) -> tuple[str, Path]:
    """Make a small checkpoint of a family; return where it lies in floats, and where quantised."""
    made_of = next(one for one in RANDOM_FAMILIES if one.name == family)
    made_of = replace(made_of, settings={**made_of.settings, **_IN_GROUPS.get(family, {})})
    plain = make_checkpoint(made_of, HUB, target, repo_root / "test/models/tiny-qwen3-moe")
    return plain, quantise(Path(plain), target / "quantised", form)


def answers(engine: Any) -> list[list[int]]:
    requests = make_requests(PAGE)
    made = engine.generate(input_ids=requests.input_ids, sampling_params=requests.sampling_params)
    return [one["output_ids"] for one in made]


def matrices_of(path: Path) -> dict[str, QuantisedMatrix]:
    form = form_of_weights(str(path))
    assert form is not None
    return dict(find_quantised(read_header(path / "model.safetensors"), form).matrices)


def saved_bytes(path: Path, of_32: int) -> int:
    """Return the bytes that matrices take less than in bfloat16, if 32 numbers take `of_32` with their scales."""
    kept = [one for name, one in matrices_of(path).items() if not _AS_FLOATS.search(name)]
    numbers = sum(math.prod(one.shape) for one in kept)
    return numbers * 2 - numbers // 32 * of_32


def test_quantised_weights_may_be_rounded_to_int8(
    tmp_path: Path, model_path: Callable[[str], str], prompts: Prompts, started: Callable[..., Any]
) -> None:
    path = quantise(Path(model_path(FAMILIES[0])), tmp_path / "awq", "awq")
    floats = as_floats(path, tmp_path / "floats")
    settings = {"dtype": "bfloat16", "page_size": 16, "cpu_weight_dtype": "int8"}
    quantised, plain = (started(model_path=str(one), **settings) for one in (path, floats))
    assert generate(quantised, prompts) == generate(plain, prompts)


@pytest.mark.parametrize(
    ("family", "form", "of_32", "read"),
    [
        (FAMILIES[0], "fp8-blocks", 36, (".weight",)),
        (FAMILIES[1], "fp8-rows", 36, (".weight",)),
        (FAMILIES[2], "int8-rows", 36, (".weight",)),
        (FAMILIES[0], "gptq-4", 20, (".qweight", ".qzeros", ".scales")),
        (FAMILIES[2], "awq", 20, (".qweight", ".qzeros", ".scales")),
        (FAMILIES[1], "packed-4-zeros", 20, (".weight_packed", ".weight_scale", ".weight_zero_point")),
    ],
)
def test_streamed_experts_of_4_or_8_bits_have_the_tokens_of_resident_ones(
    family: str,
    form: str,
    of_32: int,
    read: tuple[str, ...],
    tmp_path: Path,
    model_path: Callable[[str], str],
    prompts: Prompts,
    started: Callable[..., Any],
) -> None:
    path = quantise(Path(model_path(family)), tmp_path / form, form)
    settings: dict[str, Any] = {"model_path": str(path), "dtype": "bfloat16", "page_size": 16}
    expected = generate(started(**settings), prompts)
    matrices = [one for name, one in matrices_of(path).items() if ".experts." in name]
    layers = len({one.name.split(".")[2] for one in matrices})
    numbers = sum(math.prod(one.shape) for one in matrices)
    in_files = sum(one.parts[end].num_bytes for one in matrices for end in read)
    ring = {"weights": "streamed", "weight_memory": numbers // 32 * of_32 * 2 // layers}  # two layers
    for more in (ring, ranks(2) | {"weights": "streamed"}):
        streamed = started(**settings, **more)
        assert generate(streamed, prompts) == expected
        stats = streamed.batch_stats()
        counted = [rank["counters"] for rank in stats["ranks"]] if "tp_size" in more else [stats["counters"]]
        for one in counted:
            assert one["weights_bytes_read"] == one["weights_read"] * in_files * 3 // len(matrices) > 0
        streamed.shutdown()


@pytest.mark.parametrize(
    ("form", "more", "message"),
    [
        ("gptq-8-v2", {}, r"quantised \(gptq\); streamed weights are .* on a CPU fp8 \(e4m3\), int8"),
        ("packed-8-rows", {}, r"gate_proj\.weight \(or w1\) and its two companions are not in .*--weights resident"),
        ("gptq-4-reordered", {}, r"quantised \(gptq\); streamed weights are .* in order"),
        ("fp8-blocks", {"cpu_weight_dtype": "int8"}, r"'int8', and the model's weights are quantised and streamed"),
        ("fp8-blocks", {"dtype": "float32"}, r"computes in torch\.float32 .* give --dtype bfloat16"),
    ],
)
def test_what_cannot_be_streamed_of_quantised_experts_is_refused(
    form: str, more: dict[str, str], message: str, tmp_path: Path, model_path: Callable[[str], str]
) -> None:
    path = quantise(Path(model_path(FAMILIES[0])), tmp_path / form, form)
    with pytest.raises(ConfigError, match=message):
        Engine(**{"model_path": str(path), "weights": "streamed", "dtype": "bfloat16", **more})


def test_a_form_that_is_not_read_is_refused_before_anything_starts(
    tmp_path: Path, model_path: Callable[[str], str]
) -> None:
    path = quantise(Path(model_path(FAMILIES[0])), tmp_path / "awq", "awq")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["version"] = "gemv"
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"quantised by awq laid out for another kernel.*version 'gemv'"):
        Engine(model_path=str(path))
    with pytest.raises(ConfigError, match=r"quantization is 'fp8'.*--cpu-weight-dtype int8"):
        Engine(model_path=model_path(FAMILIES[0]), quantization="fp8")
