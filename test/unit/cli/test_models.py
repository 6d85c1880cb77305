"""`sgl-batch models` prints the table, `sgl-batch check` judges one model by its config and headers."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from sgl_batch.checkpoint.files import StoredTensor
from sgl_batch.checkpoint.tensors import ModelTensor
from sgl_batch.cli.models.check_command import check_command
from sgl_batch.cli.models.list_command import models_command
from sgl_batch.cli.models.tables import as_json
from sgl_batch.core.supported_models import FAMILIES, FORMATS

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "test" / "models" / "tiny-qwen3-moe"
LAYERS, EXPERTS, HIDDEN, WIDTH, VOCABULARY = 8, 64, 2048, 4096, 32768
LARGE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "dtype": "bfloat16",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": WIDTH,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
}
EXPERT_BYTES = LAYERS * EXPERTS * 3 * HIDDEN * WIDTH * 2


def to_message(capsys, *argv):
    """Run the command. Return its exit code and its JSON."""
    code = check_command([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture
def large(tmp_path):
    """Make a checkpoint with 24 GiB of experts in a sparse file."""
    header, end = {}, 0
    shapes = {"model.embed_tokens.weight": [VOCABULARY, HIDDEN], "lm_head.weight": [VOCABULARY, HIDDEN]}
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            own = f"model.layers.{layer}.mlp.experts.{expert}"
            shapes |= {f"{own}.{name}.weight": [WIDTH, HIDDEN] for name in ("gate_proj", "up_proj")}
            shapes[f"{own}.down_proj.weight"] = [HIDDEN, WIDTH]
    shapes[f"model.layers.{LAYERS}.mlp.experts.0.up_proj.weight"] = [WIDTH, HIDDEN]  # of speculative decoding
    for name, shape in shapes.items():
        num_bytes = 2 * shape[0] * shape[1]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + num_bytes]}
        end += num_bytes
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(tmp_path / "model.safetensors", 8 + len(text) + end)
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    return tmp_path


def with_config(directory, **fields):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return str(directory)


def test_the_page_of_the_documents_is_the_table_of_the_engine(capsys):
    assert models_command(["--markdown"]) == 0
    page = capsys.readouterr().out
    assert (ROOT / "docs" / "models.md").read_text(encoding="utf-8") == page, (
        "sgl-batch models --markdown makes it anew"
    )


def test_the_list_has_each_family_and_format_for_people_and_programs(capsys):
    assert models_command(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(json.dumps(as_json()))
    assert [row["name"] for row in report["families"]] == [row.name for row in FAMILIES]
    assert {row["cpu"]["status"] for row in report["number_formats"]} == {"works", "refused"}
    assert models_command([]) == 0
    text = capsys.readouterr().out
    assert all(row.name in text for row in (*FAMILIES, *FORMATS))


def test_a_model_that_runs_is_shown_with_its_memory_by_use(capsys):
    code, report = to_message(capsys, "--model", str(TINY), "--device-memory", "1G", "--kv-store-bytes", "64M")
    assert (code, report["runs"], report["forward"], report["number_format"]) == (0, True, "coroutine", "bfloat16")
    assert report["parameters"] == {"total": 3_351_936, "experts": 2_359_296, "active": 1_582_464}
    assert report["expert_bytes"] == 2 * 2_359_296
    assert report["kv_token_bytes"] == 2 * 2 * 32 * 4 * 2
    assert sum(report["uses"].values()) + report["kv_bytes"] + 64 * report["kv_token_bytes"] == 1 << 30
    assert report["sequences_on_device"] == report["kv_bytes"] // (4096 * report["kv_token_bytes"])
    assert report["sequences_in_store"] == 16
    assert check_command(["--model", str(TINY), "--device-memory", "1G"]) == 0
    assert "It would run." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "shape", "is_expert", "is_streamable"),
    [
        ("model.layers.0.mlp.experts.3.up_proj.weight", (8, 4), True, True),
        ("model.layers.0.mlp.experts.gate_up_proj", (16, 8, 4), True, True),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (16, 8), True, False),
        ("model.layers.0.block_sparse_moe.input_linear.weight", (16, 8, 4), True, False),
        ("model.layers.0.mlp.shared_experts.up_proj.weight", (8, 4), False, False),
    ],
)
def test_routed_experts_are_known_by_name_or_as_a_stack(name, shape, is_expert, is_streamable):
    tensor = ModelTensor(name, StoredTensor(file=TINY, dtype="BF16", shape=shape, begin=0, num_bytes=0))
    assert (tensor.is_expert, tensor.is_streamable) == (is_expert, is_streamable)


def test_rounded_weights_take_half(capsys):
    _, report = to_message(capsys, "--model", str(TINY), "--cpu-weight-dtype", "int8", "--device", "cpu")
    assert report["expert_bytes"] == 2_359_296 + 4 * 4 * 16 * (96 + 96 + 128)


def test_a_model_larger_than_the_device_is_reported_to_need_streamed_weights(capsys, large):
    code, report = to_message(capsys, "--model", str(large), "--device", "gpu", "--device-memory", "16G")
    assert (code, report["runs"], report["expert_bytes"]) == (1, False, EXPERT_BYTES)
    assert "device_memory is 16.00 GiB, and" in report["why"]
    assert report["flags"] == ["--weights", "streamed"]
    code, streamed = to_message(
        capsys, "--model", str(large), "--device", "gpu", "--device-memory", "16G", *report["flags"]
    )
    assert (code, streamed["uses"]) == (0, report["with_flags"]["uses"])
    assert streamed["uses"]["weights"] < EXPERT_BYTES // 2
    assert check_command(["--model", str(large), "--device", "gpu", "--device-memory", "16G"]) == 1
    assert "It would with --weights streamed: of 4,096 tokens" in capsys.readouterr().out


def test_sequences_longer_than_the_device_holds_do_not_run(capsys, large):
    argv = ["--model", str(large), "--device", "gpu", "--device-memory", "28G", "--b-moe-decode", "4"]
    assert to_message(capsys, *argv)[0] == 0
    with_config(large, max_position_embeddings=1_000_000)
    code, report = to_message(capsys, *argv, "--context-length", "1000000")
    assert code == 1
    assert "a sequence of 1,000,000 tokens takes" in report["why"]


def test_the_memory_of_an_unknown_gpu_has_to_be_given(capsys):
    code, report = to_message(capsys, "--model", str(TINY), "--device", "gpu")
    assert code == 1
    assert "give --device-memory, as in 80G" in report["why"]
    assert report["weight_bytes"] > 0


@pytest.mark.parametrize(
    ("fields", "argv", "words"),
    [
        ({"linear_num_value_heads": 4}, [], "is refused: it carries a state"),
        ({"quantization_config": {"quant_method": "modelopt"}}, ["--device", "cpu"], r"quantised by modelopt"),
        ({"dtype": "float16"}, ["--device", "cpu"], "would run in float16: the CPU's kernels take bfloat16"),
        ({"architectures": ["BertLMHeadModel"]}, [], "SGLang has no model of its own for it"),
        ({"architectures": ["OlmoeForCausalLMx"]}, [], "which this SGLang does not know"),
        ({"architectures": ["CohereForCausalLM"]}, ["--mix-prefill", "64"], "mix_prefill is 64, and CohereForCausalLM"),
    ],
)
def test_what_would_be_refused_at_the_start_is_refused_with_the_same_words(capsys, tmp_path, fields, argv, words):
    model = with_config(Path(shutil.copytree(TINY, tmp_path / "model")), **fields)
    code, report = to_message(capsys, "--model", model, *argv)
    assert (code, report["runs"], report["forward"]) == (1, False, "refused")
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(report["why"])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--cpu-weight-dtype", "lossless12", "--weights", "streamed"], "and weights are streamed"),
        (["--kv-store-bytes", "1000"], r"kv_store_bytes is 1000 bytes, and a page of KV takes 64\.00 KiB"),
        (["--kv-store-bytes", "1000T"], "lower --kv-store-bytes, or name a directory"),
        (["--weight-memory", "1M"], "weights are resident"),
        (
            ["--weights", "streamed", "--weight-memory", "1K"],
            r"a layer take 1\.12 MiB: raise --weight-memory",
        ),
        (["--cpu-weight-dtype", "lossless12", "--dtype", "float32"], "experts of bfloat16, and its are float32"),
        (["--max-model-len", "4097"], "--context-length: 4,097 tokens, and a sequence of this model has at most 4,096"),
        (["--device-memory", "1000T"], "more than the machine has"),
    ],
)
def test_sizes_and_types_that_no_engine_takes_do_not_run(capsys, argv, words):
    code, report = to_message(capsys, "--model", str(TINY), "--device", "cpu", *argv)
    assert (code, report["runs"]) == (1, False)
    assert re.search(words, report["why"])


def test_another_machine_has_memory_of_its_own(capsys):
    argv = ["--model", str(TINY), "--device", "gpu", "--device-memory", "80G", "--kv-store-bytes", "1000T"]
    assert to_message(capsys, *argv)[0] == 0


@pytest.mark.parametrize(("kind", "most"), [("linear", 16_384), ("llama3", 4_096)])
def test_a_stretched_context_is_as_long_as_sglang_makes_it(capsys, tmp_path, kind, most):
    copied = Path(shutil.copytree(TINY, tmp_path / "model"))
    model = with_config(copied, rope_scaling={"rope_type": kind, "factor": 4.0})
    argv = ["--model", model, "--device", "cpu", "--context-length"]
    assert to_message(capsys, *argv, str(most))[0] == 0
    code, report = to_message(capsys, *argv, str(most + 1))
    assert (code, f"has at most {most:,}" in report["why"]) == (1, True)


def test_without_a_budget_an_engine_on_a_cpu_takes_half_of_the_memory(capsys):
    _, report = to_message(capsys, "--model", str(TINY), "--device", "cpu")
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert report["device_memory"] == machine // 2
    assert sum(report["uses"].values()) + report["kv_bytes"] <= machine // 2


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model", "org/never-fetched"], r"download it first \(hf download org/never-fetched\)"),
        (["--model", "/never/made"], r"there is no directory /never/made, and no model of the hub has such a name"),
        (["--model", "./made"], r"there is no directory \./made, and no model of the hub has such a name"),
        (["--model", str(TINY), "--page-size", "0"], "--page-size is 0; it must be at least 1"),
        (["--model", str(TINY), "--device-memory", "much"], "device_memory is 'much'"),
        (["--model", str(ROOT / "docs")], "has no config.json"),
    ],
)
def test_a_mistake_is_reported_without_a_traceback(capsys, argv, words):
    code, report = to_message(capsys, *argv)
    assert (code, report["runs"]) == (1, False)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(report["why"])


def test_help_is_two_pages(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit):
        check_command(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 120
    assert "exit codes:" in lines
