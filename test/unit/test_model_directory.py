"""A model that cannot be loaded is refused in words, in milliseconds, before anything slow is imported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sgl_batch.errors import ConfigError
from sgl_batch.model_directory import ModelPlace, check_model, num_experts
from sgl_batch.sglang_adapter.known_models import is_known_architecture


@pytest.fixture
def model(repo_root: Path, tmp_path: Path) -> Path:
    """A copy of a tiny model."""
    return Path(shutil.copytree(repo_root / "test" / "models" / "tiny-qwen3-moe", tmp_path / "model"))


def check(model: Path | str, **more: object) -> None:
    check_model(ModelPlace(model=str(model), **more), is_known_architecture)  # type: ignore[arg-type]


def spoil_config(model: Path, **fields: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def cut(path: Path, num_bytes: int) -> None:
    os.truncate(path, num_bytes)


def without(model: Path, pattern: str) -> None:
    for path in model.glob(pattern):
        path.unlink()


def index_of_two_files(model: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


SPOILED: list[tuple[Callable[[Path], object], str]] = [
    (lambda model: without(model, "config.json"), r"has no config\.json; name the directory that has it"),
    (lambda model: (model / "config.json").write_text('{"a": '), r"config\.json is no JSON \(.*\); restore it"),
    (lambda model: spoil_config(model, architectures=[]), "names no architecture"),
    (lambda model: spoil_config(model, architectures=["FooForCausalLM"]), "FooForCausalLM, which this SGLang does not"),
    (lambda model: without(model, "*.safetensors"), "has no weights .* --load-format dummy"),
    (lambda model: cut(model / "model.safetensors", 1 << 20), "have 1,048,576 bytes, and by their header 6,730,032"),
    (lambda model: cut(model / "model.safetensors", 5), "the file was cut short"),
    (lambda model: cut(model / "model.safetensors", 0), "the file was cut short"),
    (lambda model: (model / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), "LFS"),
    (lambda model: (model / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"[]"), "no file of safetensors"),
    (index_of_two_files, r"names 2 files of weights, of which 1 are not there \(model-2\.safetensors, say\)"),
    (lambda model: (model / "model.safetensors.index.json").write_text("{}"), "no index of weights"),
    (lambda model: without(model, "tokenizer*"), "has no tokenizer .* --tokenizer-path"),
]


@pytest.mark.parametrize(("spoil", "words"), SPOILED)
def test_a_spoiled_directory_is_refused_with_what_to_do(
    model: Path, spoil: Callable[[Path], object], words: str
) -> None:
    check(model)
    spoil(model)
    with pytest.raises(ConfigError, match=words) as caught:
        check(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["nothere/model", "./models", "/nothere", "a/b/c", "model/nothere"])
def test_a_path_that_is_absent_does_not_exist(model: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)
    (model.parent / "nothere").mkdir()
    with pytest.raises(ConfigError, match=f"the model {name} does not exist"):
        check(name)
    with pytest.raises(ConfigError, match=f"the tokenizer {name} does not exist"):
        check(model, tokenizer=name)


def test_a_name_on_the_hub_that_is_not_in_the_cache_is_said_to_need_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no directory org/model, .* while HF_HUB_OFFLINE is set"):
        check("org/model")
    program = (
        "from sgl_batch.model_directory import *\n"
        "try: check_model(ModelPlace(model='org/model'), lambda _: True)\n"
        "except ConfigError as error: print(error)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "https://hub.invalid", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60)
    assert "while https://hub.invalid cannot be reached; name a directory" in done.stdout, done.stderr


def test_what_is_not_ours_to_judge_passes(model: Path) -> None:
    check("s3://bucket/model")
    spoil_config(model, architectures=["FooForCausalLM"], auto_map={"AutoModel": "code.Foo"})
    without(model, "tokenizer*")
    without(model, "*.safetensors")
    check(model, load_format="dummy", needs_tokenizer=False)


def test_a_file_is_no_model_unless_it_is_gguf(tmp_path: Path) -> None:
    for name in ("model.gguf", "model.txt"):
        (tmp_path / name).touch()
    check(tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match=r"model\.txt is a file; name the directory"):
        check(tmp_path / "model.txt")


def test_experts_are_counted_where_the_config_says_so(model: Path, tmp_path: Path) -> None:
    assert num_experts(str(model)) == 16
    (model / "config.json").write_text('{"text_config": {"n_routed_experts": 8}}')
    assert num_experts(str(model)) == 8
    assert num_experts(str(tmp_path / "none")) is None


def test_architectures_are_known_by_sglangs_source() -> None:
    names = ("Qwen3MoeForCausalLM", "MixtralForCausalLM", "DeepseekV3ForCausalLM", "FooForCausalLM")
    assert [is_known_architecture(name) for name in names] == [True, True, True, False]


def test_nothing_slow_is_imported() -> None:
    program = "import sys, sgl_batch.model_directory, sgl_batch.sglang_adapter.known_models\n"
    program += "print(sorted({'torch', 'sglang', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
