"""Quantised experts that stay in memory are packed from their files, or loaded as other weights where that fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_modules import Experts, expert_layers
from four_bit_experts import EXPERTS, HIDDEN, INTER, Tensors, checkpoint, form_of, found, reorder, set_zero_point
from safetensors.torch import load_file, save_file
from streamed_slots import MODULE, grouped, loaded_whole, numbers_of

pytest.importorskip("sgl_batch_kernel.expert_loader")

from sgl_batch.layers.small_weights import GroupedForm
from sgl_batch.weights import direct_experts, model_experts
from sgl_batch.weights.dequantised import Dequantised
from sgl_batch.weights.direct_experts import DirectExperts
from sgl_batch.weights.expert_slots import SlotTensors
from sgl_batch.weights.load_share import LoadShare
from sgl_batch.weights.page_cache import cached_share
from sgl_batch.weights.unloaded_experts import unloaded_experts

OTHER = "model.norm.weight"


def model_of(experts: int, dtype: torch.dtype, *, hidden: int, inter: int) -> torch.nn.Module:
    with unloaded_experts():
        inner: torch.nn.Module = Experts(experts, dtype, hidden=hidden, inter=inter)
    for name in reversed(MODULE.split(".")):
        inner = torch.nn.ModuleDict({name: inner})
    return inner


@pytest.fixture(autouse=True)
def these_are_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_experts, "expert_layers", expert_layers)
    monkeypatch.setattr(direct_experts, "expert_layers", expert_layers)


class Load:
    """A load of a checkpoint: the names and copies of what is left to SGLang, and what is adopted."""

    def __init__(
        self,
        path: Path,
        *,
        experts: int = EXPERTS,
        shard: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        hidden: int = HIDDEN,
        inter: int = INTER,
        may_read: bool = True,
    ) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self.had_memory = False  # parameters of experts, when the other tensor came
        self.adopted: list[tuple[GroupedForm, torch.Tensor, torch.Tensor]] = []
        self.model, self.dtype = model_of(experts, dtype, hidden=hidden, inter=inter), dtype
        [self.layer] = expert_layers(self.model)
        self.loads = LoadShare(range(shard * experts, (shard + 1) * experts))
        self.direct = DirectExperts(
            self, form_of(path), shard=shard, num_threads=2, may_read=lambda _: may_read, adopt=self.adopt
        )
        file = path / "model.safetensors"
        weights = self.direct.reading(Dequantised(form_of(path), dtype, self.loads))([str(file)], self.of(file))
        self.direct.load(self.model, weights, self.take)

    def of(self, file: Path) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield a file's tensors as the loader does, which asks for each name whether it is left out."""
        return ((name, one) for name, one in load_file(file).items() if not self.direct.leaves(name))

    def load(self, model: torch.nn.Module, weights: Any, load_weights: Callable[[Any], object]) -> None:
        """Be the inner watch."""
        assert model is self.model
        load_weights(weights)

    def take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, one in weights:
            has_memory = self.layer.w13_weight.is_contiguous() and self.layer.w2_weight.is_contiguous()
            assert has_memory or ".experts." not in name
            self.had_memory |= name == OTHER and has_memory
            self.loaded[name] = one.clone()

    def adopt(self, layer: object, form: GroupedForm, data: tuple[torch.Tensor, torch.Tensor]) -> None:
        assert layer is self.layer
        self.adopted.append((form, *data))


def open_files() -> list[str]:
    """Return the links of this process's open files."""
    found = [f"/proc/self/fd/{one}" for one in os.listdir("/proc/self/fd")]
    return [one for one in found if os.path.islink(one)]


def with_other(path: Path) -> Path:
    file = path / "model.safetensors"
    save_file({**load_file(file), OTHER: torch.arange(8.0)}, file, {"format": "pt"})
    return path


@pytest.mark.parametrize(("experts", "shard"), [(EXPERTS, 0), (1, 2)])
@pytest.mark.parametrize("form", ["gptq-4", "awq", "packed-4-zeros", "fp8-blocks", "int8-rows"])
def test_experts_of_a_shard_are_packed_with_the_numbers_of_their_floats(
    form: str, experts: int, shard: int, tmp_path: Path
) -> None:
    path = with_other(checkpoint(tmp_path, form))
    whole = loaded_whole(path / "model.safetensors", form_of(path))
    load = Load(path, experts=experts, shard=shard)
    assert list(load.loaded) == [OTHER]
    assert not any("safetensors" in os.readlink(one) for one in open_files()), "no file stays open"
    assert load.layer.w13_weight.untyped_storage().nbytes() == 2, "nobody gives it memory but who adopts"
    [(packed_form, w13, w2)] = load.adopted
    locations = found(path)
    assert (packed_form, len(w13)) == (grouped(locations), experts)
    for index, matrices in enumerate(numbers_of(locations, SlotTensors(w13=w13, w2=w2))):
        for name, one in zip(("gate", "up", "down"), matrices, strict=True):
            assert torch.equal(one, whole[f"{MODULE}.{shard * experts + index}.{name}_proj.weight"])


def spoil_code(tensors: Tensors) -> None:
    tensors[f"{MODULE}.1.up_proj.weight"].view(torch.uint8)[3, 5] = 0x7F


def widen_scale(tensors: Tensors) -> None:
    tensors[f"{MODULE}.1.up_proj.weight_scale_inv"][0, 0] = 1000


@pytest.mark.parametrize(
    ("form", "change", "more", "comes_last"),
    [
        ("gptq-4", set_zero_point, {}, True),
        ("fp8-blocks", spoil_code, {}, True),
        ("fp8-blocks", widen_scale, {}, False),
        ("gptq-4", reorder, {}, False),
        ("gptq-4", None, {"dtype": torch.float32}, False),
        ("gptq-4", None, {"may_read": False}, False),
    ],
)
def test_others_are_loaded_as_other_weights(
    form: str, change: Callable[[Tensors], None] | None, more: Mapping[str, Any], comes_last: bool, tmp_path: Path
) -> None:
    path = with_other(checkpoint(tmp_path, form, change=change))
    load = Load(path, **more)
    whole = loaded_whole(path / "model.safetensors", form_of(path), load.dtype)
    assert load.adopted == []
    assert load.loaded.keys() == whole.keys()
    assert all(torch.equal(one.nan_to_num(7), whole[name].nan_to_num(7)) for name, one in load.loaded.items())
    assert load.had_memory != comes_last
    assert not load.direct.leaves(f"{MODULE}.0.up_proj.weight")


def test_files_in_the_page_cache_stay_there(tmp_path: Path) -> None:
    path = with_other(checkpoint(tmp_path, "gptq-4", hidden=4096, inter=1024))
    file = path / "model.safetensors"
    file.read_bytes()
    assert len(Load(path, hidden=4096, inter=1024).adopted) == 1
    assert cached_share(file) == 1
