"""The command: bad arguments end it with one line, random checkpoints have released models' key names."""

from __future__ import annotations

import json
import sys

import pytest
import random_checkpoint
import random_dense_checkpoint
from comparison.child import last_error, run_child
from offline import main, parse_engine_arguments, parse_engines, parse_environments
from safetensors import safe_open

from sgl_batch.errors import ConfigError


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--model is missing"),
        (["--model", "nowhere"], "--model nowhere is not a checkpoint directory"),
        (["--model", "MODEL", "--chat"], "--chat is given without --jsonl"),
        (["--model", "MODEL", "--jsonl", "nowhere.jsonl"], "--jsonl nowhere.jsonl is not a file"),
        (["--model", "MODEL", "--num-prompts", "0"], "--num-prompts is 0"),
        (["--model", "MODEL", "--rounds", "0"], "--rounds is 0"),
        (["--model", "MODEL", "--input-len", "9999"], "more than the model's context of 4096"),
        (["--model", "MODEL", "--engine-env", "vllm=nowhere"], "--engine-env vllm: nowhere is not a file"),
        (["--model", "MODEL", "--engine-env", "mystery=nowhere"], "--engine-env is 'mystery=nowhere'"),
        (["--model", "MODEL", "--engine-env", "vllm"], "--engine-env is 'vllm'"),
        (["--model", "MODEL", *["--engine-env", f"vllm-a={sys.executable}"] * 2], "--engine-env names vllm-a twice"),
        (["--model", "MODEL", "--engines", "vllm-a"], "--engines names 'vllm-a'"),
        (["--model", "MODEL", "--engines", "stock,mystery"], "--engines names 'mystery'"),
        (["--model", "MODEL", "--engine-arg", "stock=1"], "--engine-arg is 'stock=1'"),
        (["--model", "MODEL", "--top-p", "0.9"], "they need a --temperature above 0"),
        (["--model", "MODEL", "--temperature", "3"], "--temperature is 3; it is from 0 to 2"),
        (["--model", "MODEL", "--temperature", "1", "--engines", "sgl_batch,hf"], "hf can only be compared greedily"),
        (["--model", "MODEL", "--score-prompts", "--engines", "sgl_batch,hf"], "hf are not asked for that here"),
        (["--make-model", "MODEL"], "already holds files"),
        (["--make-model", "new-model", "--make-model-vocabulary", "40000"], "--make-model-vocabulary is for qwen3-30b"),
        (["--make-model", "new-model", "--make-model-layers", "0"], "--make-model-layers is 0"),
    ],
)
def test_a_bad_argument_ends_the_command_with_one_line(argv, message, repo_root, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = str(repo_root / "test" / "models" / "tiny-qwen3-moe")
    code = main([model if word == "MODEL" else word for word in argv])
    error = capsys.readouterr().err
    assert code == 1
    assert message in error
    assert error.count("\n") == 1


def test_engines_keep_the_order_given_without_duplicates():
    assert parse_engines("vllm, sgl_batch") == ["vllm", "sgl_batch"]
    with pytest.raises(ConfigError, match="hf twice"):
        parse_engines("hf,stock,hf")


def test_labels_of_environments_are_engines_of_their_own_behind_the_others():
    assert parse_engines("vllm-a,vllm", ["vllm-a"]) == ["vllm-a", "vllm"]
    assert parse_engines(None, ["vllm-a", "vllm"])[-2:] == ["llamacpp", "vllm-a"]
    assert parse_environments([f"vllm-a={sys.executable}", f"hf={sys.executable}"]).keys() == {"vllm-a", "hf"}


def test_a_label_has_the_arguments_of_its_engine_and_its_own():
    found = parse_engine_arguments(["vllm:max_num_seqs=256", "vllm-a:max_num_seqs=64", "vllm-a:seed=3"], ["vllm-a"])
    assert found["vllm"] == {"max_num_seqs": 256}
    assert found["vllm-a"] == {"max_num_seqs": 64, "seed": 3}


def test_arguments_of_sgl_batch_also_go_to_its_comparison_without_accumulation():
    found = parse_engine_arguments(["sgl_batch:b_attn_decode=8", "stock:attention_backend=triton"])
    assert found["sgl_batch"] == found["sgl_batch_no_accumulate"] == {"b_attn_decode": 8}
    assert found["stock"] == {"attention_backend": "triton"}


def test_a_failed_child_reports_its_last_error_and_leaves_no_result(tmp_path):
    spec, result, log = tmp_path / "spec.json", tmp_path / "result.json", tmp_path / "child.log"
    spec.write_text(json.dumps({"engine": "no such engine"}))
    end = run_child(sys.executable, spec, result, log, limit_s=60.0, threads=1)
    assert end.reason == "KeyError: 'no such engine'"
    assert not result.exists()


def test_a_child_past_its_time_limit_is_ended_and_reported(tmp_path):
    spec = tmp_path / "spec.json"
    spec.write_text("{}")
    end = run_child(sys.executable, spec, tmp_path / "result.json", tmp_path / "log", limit_s=0.0, threads=1)
    assert end.reason == "timed out after 0 s"


def test_a_child_ended_by_a_signal_without_a_message_reports_the_signal(tmp_path):
    log = tmp_path / "child.log"
    log.write_text("loading\n")
    assert last_error(log, -9) == "ended with signal 9 and no result; see child.log"


def test_a_random_checkpoint_has_the_key_names_of_released_ones(tmp_path, repo_root, monkeypatch):
    for name, size in {"HIDDEN": 32, "EXPERTS": 4, "EXPERT_WIDTH": 16, "VOCABULARY": 200}.items():
        monkeypatch.setattr(random_checkpoint, name, size)
    tiny = repo_root / "test" / "models" / "tiny-qwen3-moe"
    parameters = random_checkpoint.make_checkpoint(tmp_path / "made", tiny, 2, lambda _: None)
    index = json.loads((tmp_path / "made" / "model.safetensors.index.json").read_text())
    with safe_open(tiny / "model.safetensors", "pt") as trained:
        kept = [key for key in trained.keys() if ".layers." not in key or _layer(key) < 2]  # noqa: SIM118
    assert set(index["weight_map"]) == {key for key in kept if ".experts." not in key or _expert(key) < 4}
    assert index["metadata"]["total_size"] == 2 * parameters
    assert json.loads((tmp_path / "made" / "config.json").read_text())["num_hidden_layers"] == 2


def test_a_random_dense_checkpoint_has_an_mlp_in_place_of_experts_and_a_tied_output(tmp_path, repo_root, monkeypatch):
    for name, size in {"HIDDEN": 32, "WIDTH": 48, "VOCABULARY": 200}.items():
        monkeypatch.setattr(random_dense_checkpoint, name, size)
    made, tiny = tmp_path / "made", repo_root / "test" / "models" / "tiny-qwen3-moe"
    parameters = random_dense_checkpoint.make_dense_checkpoint(made, tiny, 2, lambda _: None)
    index = json.loads((made / "model.safetensors.index.json").read_text())
    with safe_open(tiny / "model.safetensors", "pt") as trained:
        kept = [key for key in trained.keys() if ".layers." not in key or _layer(key) < 2]  # noqa: SIM118
    mlps = {f"model.layers.{i}.mlp.{name}_proj.weight" for i in range(2) for name in ("gate", "up", "down")}
    assert set(index["weight_map"]) == {key for key in kept if ".mlp." not in key and "lm_head" not in key} | mlps
    assert index["metadata"]["total_size"] == 2 * parameters
    assert json.loads((made / "config.json").read_text())["tie_word_embeddings"] is True


def _layer(key):
    return int(key.split(".")[2])


def _expert(key):
    return int(key.split(".")[5])
