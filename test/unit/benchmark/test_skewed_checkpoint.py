"""A checkpoint with skewed routers: a few experts get most tokens, whatever the tokens; all else is the original."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from several_ranks.skewed_checkpoint import FILE, ROUTERS, make_skewed, skewed

from sgl_batch.errors import ConfigError


@pytest.fixture
def variant(tmp_path):
    directory = tmp_path / "variant"
    directory.mkdir()
    return directory


def test_hot_experts_take_half_of_all_choices_and_the_rest_stay_as_they_are():
    generator = torch.Generator().manual_seed(0)
    router_EH = torch.randn(64, 128, generator=generator)
    x_TH = torch.randn(2000, 128, generator=generator)
    hot = skewed(router_EH, 8)
    assert torch.equal(hot[8:], router_EH[8:])
    chosen = (x_TH @ hot.T).topk(8, dim=-1).indices
    per_expert = torch.bincount(chosen.flatten(), minlength=64).float()
    assert per_expert[:8].sum() / chosen.numel() == pytest.approx(0.5, abs=0.05)
    assert per_expert[:8].min() > 2 * per_expert[8:].max(), "each of them is hot"


@pytest.mark.parametrize("num_hot", [0, 3, 66])
def test_hot_experts_come_in_pairs(num_hot):
    with pytest.raises(ConfigError, match=f"{num_hot} hot experts of 64"):
        skewed(torch.zeros(64, 8), num_hot)


def test_only_routers_are_written_and_every_other_file_is_a_link(repo_root, variant):
    model = repo_root / "test" / "models" / "tiny-qwen3-moe"
    make_skewed(model, variant, num_hot=4)
    written = load_file(variant / FILE)
    original = load_file(model / "model.safetensors")
    assert written.keys() == {name for name in original if name.endswith(ROUTERS)}
    assert len(written) == 4
    for name, router in written.items():
        assert torch.equal(router[4:], original[name][4:])
        assert router.dtype == original[name].dtype
    links = {path.name for path in variant.iterdir() if path.is_symlink()}
    assert links == {path.name for path in model.iterdir()}
    assert (variant / "model.safetensors").resolve() == (model / "model.safetensors").resolve()


def test_an_index_names_the_file_of_the_new_routers(tmp_path, variant):
    model = tmp_path / "model"
    model.mkdir()
    tensors = {"model.layers.0.mlp.gate.weight": torch.ones(4, 2), "lm_head.weight": torch.ones(2)}
    save_file(tensors, model / "model-1.safetensors")
    weight_map = dict.fromkeys(tensors, "model-1.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    make_skewed(model, variant, num_hot=2)
    found = json.loads((variant / "model.safetensors.index.json").read_text())["weight_map"]
    assert found == {"model.layers.0.mlp.gate.weight": FILE, "lm_head.weight": "model-1.safetensors"}


@pytest.mark.parametrize(
    ("name", "tensors", "message"),
    [
        ("model.safetensors", {"lm_head.weight": torch.ones(2)}, "holds no router"),
        ("weights.safetensors", {"a.mlp.gate.weight": torch.ones(4, 2)}, r"weights\.safetensors, which would be read"),
    ],
)
def test_a_checkpoint_that_cannot_be_varied_is_refused(tmp_path, variant, name, tensors, message):
    model = tmp_path / "model"
    model.mkdir()
    save_file(tensors, model / name)
    with pytest.raises(ConfigError, match=message):
        make_skewed(model, variant, num_hot=2)
