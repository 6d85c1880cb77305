"""A model that cannot be loaded is refused with a reason, in milliseconds, before anything slow is imported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from sgl_batch.checkpoint.model_directory import ModelSource, check_model, num_experts
from sgl_batch.errors import ConfigError
from sgl_batch.sglang_adapter.known_models import is_known_architecture, is_known_quantization


@pytest.fixture
def model(repo_root: Path, tmp_path: Path) -> Path:
    """Return a copy of a tiny model."""
    return Path(shutil.copytree(repo_root / "test" / "models" / "tiny-qwen3-moe", tmp_path / "model"))


def check(model: Path | str, **more: object) -> None:
    check_model(ModelSource(model=str(model), **more), is_known_architecture, is_known_quantization)  # type: ignore[arg-type]


def spoil_config(model: Path, **fields: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def cut(path: Path, num_bytes: int) -> None:
    os.truncate(path, num_bytes)


def without(model: Path, pattern: str) -> None:
    for path in model.glob(pattern):
        path.unlink()


def index(model: Path, **weight_map: str) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def respell(model: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the tensors' entries in the header of the weights."""
    path = model / "model.safetensors"
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[end:])


def rename(model: Path, *names: str) -> None:
    """Give tensors the names that follow theirs."""
    respell(model, lambda header: [header.update({new: header.pop(old)}) for old, new in zip(*[iter(names)] * 2)])  # noqa: B905


def add_scales(model: Path, dtype: str, numbers: bytes) -> None:
    """A second file of weights, with scales."""
    entry = {"dtype": dtype, "shape": [2], "data_offsets": [0, len(numbers)]}
    text = json.dumps({"model.layers.0.mlp.gate.weight_scale_inv": entry}).encode()
    (model / "scales.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + numbers)


def only_pickled(model: Path, begin: bytes) -> None:
    without(model, "*.safetensors")
    (model / "pytorch_model.bin").write_bytes(begin)


POINTER = b"version https://git-lfs.github.com/spec/v1\n"
EXPERT = "model.layers.1.mlp.experts.15.up_proj.weight"
NORM = "model.layers.3.input_layernorm.weight"

SPOILED: list[tuple[Callable[[Path], object], str]] = [
    (lambda model: without(model, "config.json"), r"has no config\.json; name the directory with it"),
    (lambda model: (model / "config.json").write_text('{"a": '), r"config\.json is no JSON \(.*\); restore it"),
    (lambda model: (model / "config.json").write_bytes(POINTER), r"config\.json is a pointer of Git LFS"),
    (lambda model: (model / "config.json").write_text("[]"), "names no architecture"),
    (lambda model: spoil_config(model, architectures=[]), "names no architecture"),
    (lambda model: spoil_config(model, architectures=["FooForCausalLM"]), "FooForCausalLM, which this SGLang does not"),
    (lambda model: spoil_config(model, hidden_size=None), "has hidden_size None; it needs a number there"),
    (lambda model: spoil_config(model, num_hidden_layers="4"), "has num_hidden_layers '4'; it needs a number"),
    (lambda model: spoil_config(model, vocab_size=0), "has vocab_size 0; it needs a number"),
    (
        lambda model: spoil_config(model, quantization_config={"quant_method": "foo4"}),
        "quantised by 'foo4', which this SGLang does not know; name a checkpoint",
    ),
    (lambda model: without(model, "*.safetensors"), "has no weights .* --load-format dummy"),
    (lambda model: cut(model / "model.safetensors", 1 << 20), "have 1,048,576 bytes, and by their header 6,730,032"),
    (lambda model: cut(model / "model.safetensors", 5), "the file was cut short"),
    (lambda model: cut(model / "model.safetensors", 0), "the file was cut short"),
    (lambda model: (model / "model.safetensors").write_bytes(POINTER), r"model\.safetensors is a pointer of Git LFS"),
    (lambda model: (model / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"[]"), "no file of safetensors"),
    (lambda model: (model / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{]"), "no file of safetensors"),
    (
        lambda model: respell(model, lambda header: header[NORM].update(shape=[7])),
        r"has .* bytes of .*layernorm\.weight, which BF16\[7\] does not take",
    ),
    (
        lambda model: respell(model, lambda header: header[NORM].update(shape=[-64])),
        "no valid type, shape and offsets",
    ),
    (
        lambda model: respell(model, lambda header: header[NORM].pop("data_offsets")),
        "no valid type, shape and offsets",
    ),
    (lambda model: index(model, a="model.safetensors", b="2"), r"names 2 files .* of which 1 are missing \(2, say\)"),
    (
        lambda model: index(model, lost="model.safetensors"),
        r"names 1 tensors that their files do not have \(lost, say, in model\.safetensors\)",
    ),
    (lambda model: (model / "model.safetensors.index.json").write_text("{}"), "no index of weights"),
    (
        lambda model: (model / "model.safetensors").rename(model / "model-00002-of-00004.safetensors"),
        r"has 1 of 4 files of weights: 1, 3, 4 are missing",
    ),
    (lambda model: only_pickled(model, POINTER), r"pytorch_model\.bin is a pointer of Git LFS"),
    (lambda model: only_pickled(model, b"PK\x03\x04" + bytes(99)), r"pytorch_model\.bin have 103 bytes, and no end"),
    (lambda model: only_pickled(model, b""), r"pytorch_model\.bin have 0 bytes, and no end"),
    (
        lambda model: spoil_config(model, vocab_size=999),
        r"lm_head\.weight is .* config\.json says vocab_size 999",
    ),
    (lambda model: spoil_config(model, hidden_size=32), r"\.weight is .* and config\.json says .* hidden_size 32"),
    (lambda model: spoil_config(model, num_hidden_layers=6), r"no tensor of 2 layers \(4, 5\), .* num_hidden_layers 6"),
    (lambda model: spoil_config(model, num_experts=8), r"layer 0 .* has 16 experts, the last of number 15, .* says 8"),
    (
        lambda model: rename(model, EXPERT, "x", EXPERT.replace("up", "gate"), "y", EXPERT.replace("up", "down"), "z"),
        r"layer 1 .* has 15 experts, the last of number 14, and config\.json says 16",
    ),
    (lambda model: add_scales(model, "F32", b"\0\0\x80\x3f\0\0\x80\xff"), r"gate\.weight_scale_inv in .* has 1 scales"),
    (lambda model: add_scales(model, "F8_E8M0", b"\xff\xff"), r"has 2 scales that are infinite or no numbers"),
    (lambda model: add_scales(model, "BF16", b"\xc0\x7f\x80\x3f"), r"has 1 scales that are infinite"),
    (lambda model: without(model, "tokenizer*"), "has no tokenizer .* --tokenizer-path"),
    (lambda model: cut(model / "tokenizer.json", 0), r"tokenizer\.json is empty; fetch it again"),
    (lambda model: (model / "tokenizer.json").write_bytes(b'{"\xff": 1}'), r"tokenizer\.json is no tokenizer"),
    (lambda model: (model / "model.safetensors.index.json").write_bytes(b'{"\xff": 1}'), "no index of weights"),
    (lambda model: cut(model / "tokenizer.json", 999), r"tokenizer\.json is no tokenizer \(.*; fetch it again"),
    (lambda model: (model / "tokenizer.json").write_bytes(POINTER), r"tokenizer\.json is a pointer of Git LFS"),
    (lambda model: (model / "tokenizer_config.json").write_text("{"), r"tokenizer_config\.json is no JSON"),
]


@pytest.mark.parametrize(("spoil", "words"), SPOILED)
def test_a_spoiled_directory_is_refused_with_a_remedy(model: Path, spoil: Callable[[Path], object], words: str) -> None:
    check(model)
    spoil(model)
    with pytest.raises(ConfigError, match=words) as caught:
        check(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["nothere/model", "./models", "/nothere", "a/b/c", "model/nothere"])
def test_an_absent_path_is_refused_as_absent(model: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)
    (model.parent / "nothere").mkdir()
    with pytest.raises(ConfigError, match=f"the model {name} does not exist"):
        check(name)
    with pytest.raises(ConfigError, match=f"the tokenizer {name} does not exist"):
        check(model, tokenizer=name)


def test_a_hub_name_that_is_not_cached_is_refused_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no directory org/model, .* while HF_HUB_OFFLINE is set"):
        check("org/model")
    program = (
        "from sgl_batch.checkpoint.model_directory import *\n"
        "try: check_model(ModelSource(model='org/model'), lambda _: True, lambda _: True)\n"
        "except ConfigError as error: print(error)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "https://hub.invalid", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60)
    assert "while https://hub.invalid cannot be reached; name a directory" in done.stdout, done.stderr


def test_without_a_network_a_snapshot_in_the_hub_s_cache_is_checked_too(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / "abc"
    shutil.copytree(model, snapshot)
    (tmp_path / "hub" / "models--org--model" / "refs").mkdir()
    (tmp_path / "hub" / "models--org--model" / "refs" / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    check("org/model")
    cut(snapshot / "model.safetensors", 1 << 20)
    with pytest.raises(ConfigError, match="the file was cut short"):
        check("org/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    check("org/model")
    spoil_config(snapshot, hidden_size=None)
    with pytest.raises(ConfigError, match="has hidden_size None"):
        check("org/model")


def test_models_that_cannot_be_judged_from_files_pass(model: Path) -> None:
    check("s3://bucket/model")
    spoil_config(model, architectures=["FooForCausalLM"], auto_map={"AutoModel": "code.Foo"})
    without(model, "tokenizer*")
    without(model, "*.safetensors")
    check(model, load_format="dummy", needs_tokenizer=False)


def test_unusual_but_valid_checkpoints_pass(model: Path, tmp_path: Path) -> None:
    index(model, **{NORM: "model.safetensors"})
    add_scales(model, "F32", b"\0\0\x80\x3f" * 2)
    check(model)
    text = json.loads((model / "config.json").read_text())
    nested = {"architectures": text["architectures"], "text_config": text, "vision_config": {"hidden_size": 7}}
    (model / "config.json").write_text(json.dumps(nested))
    check(model)
    spoil_config(model, text_config={**text, "vocab_size": text["vocab_size"] - 8})
    check(model, needs_tokenizer=False)  # another part's tokens
    spoil_config(model, text_config={**text, "num_hidden_layers": 3})
    check(model)  # a layer beyond the model's predicts further tokens
    spoil_config(model, text_config={**text, "num_hidden_layers": 9})
    check(model, is_overridden=True)
    tokenizer = shutil.copytree(model, tmp_path / "tokenizer")
    added = json.loads((tokenizer / "tokenizer.json").read_text())
    added["added_tokens"].append({**added["added_tokens"][0], "id": 1 << 20, "content": "<pad>"})
    (tokenizer / "tokenizer.json").write_text(json.dumps(added))
    check(model, is_overridden=True, tokenizer=str(tokenizer))


def test_a_tokenizer_of_another_model_has_tokens_without_a_row(model: Path) -> None:
    rows = json.loads((model / "config.json").read_text())["vocab_size"]
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["of another"] = rows
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=rf"tokenizer\.json has tokens up to number {rows:,}, .* vocab_size {rows:,}"):
        check(model)
    tokenizer["model"]["vocab"] = [["a", 0.0]] * (rows + 1)
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=f"tokens up to number {rows:,}"):
        check(model)


def test_a_single_file_is_a_model_only_if_it_is_gguf(tmp_path: Path) -> None:
    for name in ("model.gguf", "model.txt"):
        (tmp_path / name).touch()
    check(tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match=r"model\.txt is a file; name the directory"):
        check(tmp_path / "model.txt")


def test_experts_are_counted_by_the_config(model: Path, tmp_path: Path) -> None:
    assert num_experts(str(model)) == 16
    (model / "config.json").write_text('{"text_config": {"n_routed_experts": 8}}')
    assert num_experts(str(model)) == 8
    assert num_experts(str(tmp_path / "none")) is None


def test_methods_of_quantisation_are_known_by_sglangs_source() -> None:
    names = ("fp8", "AWQ", "gptq", "compressed-tensors", "modelopt", "mxfp4", "foo4")
    assert [is_known_quantization(name) for name in names] == [True] * 6 + [False]


def test_architectures_are_known_by_sglangs_source() -> None:
    names = ("Qwen3MoeForCausalLM", "MixtralForCausalLM", "DeepseekV3ForCausalLM", "FooForCausalLM")
    assert [is_known_architecture(name) for name in names] == [True, True, True, False]


def test_nothing_slow_is_imported() -> None:
    program = "import sys, sgl_batch.checkpoint.model_directory, sgl_batch.sglang_adapter.known_models\n"
    program += "print(sorted({'torch', 'sglang', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
