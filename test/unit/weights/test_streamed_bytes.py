"""Experts that lie in their files as bytes are streamed as such, with the numbers that a load of them all has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from streamed_slots import MODULE, fail_for, filled, grouped, hold, loaded_whole, numbers_of

from sgl_batch.checkpoint.files import read_header
from sgl_batch.core.quantised_form import QuantisedForm
from sgl_batch.errors import ConfigError
from sgl_batch.weights.expert_checkpoint import ExpertLocations, find_experts
from sgl_batch.weights.stored_scales import StoredScales, read_scales

EXPERTS = 3
NO_NUMBER = 0x7F


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How the numbers of a checkpoint share scales: `block` is (1, 0) for rows, (0, 0) for whole matrices.

    `int8`: whether they are integers, not floats.
    """

    block: tuple[int, int]
    hidden: int = 256
    inter: int = 128
    end: str = "_inv"
    int8: bool = False

    @property
    def form(self) -> QuantisedForm:
        if self.int8:
            return QuantisedForm(method="compressed-tensors", integers=((8, None),), symmetric=True)
        block = self.block if self.block[1] else None
        return QuantisedForm(method="fp8", block=block, has_e4m3=True)

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        if self.block == (0, 0):
            return ()
        if self.block == (1, 0):
            return rows, 1
        return -(-rows // self.block[0]), -(-columns // self.block[1])

    def tensors(self) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(self.hidden + self.block[0])
        made = {}
        shapes = {"gate_proj": (self.inter, self.hidden), "up_proj": (self.inter, self.hidden)}
        for expert in range(EXPERTS):
            for name, shape in {**shapes, "down_proj": (self.hidden, self.inter)}.items():
                codes = torch.randint(0, NO_NUMBER, shape, generator=draw)
                codes += 128 * torch.randint(0, 2, shape, generator=draw)
                begin = f"{MODULE}.{expert}.{name}.weight"
                if self.int8:
                    codes = torch.randint(0, 256, shape, generator=draw)
                made[begin] = codes.to(torch.uint8).view(torch.int8 if self.int8 else torch.float8_e4m3fn)
                scales = torch.rand(self.scale_shape(*shape), generator=draw) / 1000 + 1e-6
                made[f"{begin}_scale{self.end}"] = scales
        return made

    def found(
        self, folder: Path, change: Callable[[dict[str, torch.Tensor]], None] = lambda _: None
    ) -> ExpertLocations:
        tensors = self.tensors()
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return find_experts([str(folder / "model.safetensors")], [MODULE], range(EXPERTS), form=self.form)


KINDS = {
    "blocks": Kind(block=(128, 128)),
    "blocks that end within a matrix": Kind(block=(128, 128), hidden=160, inter=96),
    "small blocks": Kind(block=(16, 64)),
    "rows": Kind(block=(1, 0), end=""),
    "rows in groups of 32": Kind(block=(1, 0), hidden=96, inter=64, end=""),
    "whole": Kind(block=(0, 0), end=""),
    "rows of int8": Kind(block=(1, 0), end="", int8=True),
    "rows of int8 in groups of 32": Kind(block=(1, 0), hidden=96, inter=64, end="", int8=True),
    "whole of int8": Kind(block=(0, 0), end="", int8=True),
}


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("kind", list(KINDS.values()), ids=list(KINDS))
def test_slots_have_the_numbers_of_a_checkpoint_that_is_loaded_whole(kind: Kind, direct: bool, tmp_path: Path) -> None:
    locations = kind.found(tmp_path)
    assert grouped(locations).bits.is_int8 == kind.int8
    whole = loaded_whole(tmp_path / "model.safetensors", kind.form)
    assert hold(locations, filled(locations, direct=direct), whole)


def test_groups_are_as_large_as_scales_and_sizes_allow(tmp_path: Path) -> None:
    groups = {}
    for name, kind in KINDS.items():
        folder = tmp_path / name
        folder.mkdir()
        groups[name] = grouped(kind.found(folder)).bits.group
    by_128 = ("blocks", "rows", "whole", "rows of int8", "whole of int8")
    assert groups == {**dict.fromkeys(KINDS, 32), **dict.fromkeys(by_128, 128)}


def test_a_code_that_is_no_number_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{MODULE}.1.up_proj.weight"].view(torch.uint8)[100, 3] = NO_NUMBER

    locations = KINDS["blocks"].found(tmp_path, spoil)
    fail_for(locations, 1, rf"{tmp_path}/model\.safetensors: a matrix at byte \d+ has codes that are no")


def remove_scales(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{MODULE}.2.up_proj.weight_scale_inv"]


def add_scales(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{MODULE}.2.up_proj.weight_scale"] = torch.ones(1)


def spoil_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{MODULE}.1.down_proj.weight_scale_inv"][1, 0] = float("nan")


def enlarge_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{MODULE}.0.gate_proj.weight_scale_inv"][0, 0] = 200.0


def scale_rows(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{MODULE}.0.down_proj.weight_scale_inv"] = torch.ones(256, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove_scales, r"2\.up_proj\.weight is of 8 bits and has 0 tensors of scales; .*--weights resident"),
        (add_scales, r"2\.up_proj\.weight is of 8 bits and has 2 tensors of scales"),
        (spoil_scale, r"1\.down_proj\.weight_scale_inv has a scale of nan, .* take 0 and 7\.88861e-31 to 128"),
        (enlarge_scale, r"0\.gate_proj\.weight_scale_inv has a scale of 200"),
        (scale_rows, r"scales for blocks of \[\(1, 0\), \(128, 128\)\]; streamed weights are all alike"),
    ],
)
def test_scales_that_cannot_be_streamed_are_refused(
    change: Callable[[dict[str, torch.Tensor]], None], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        KINDS["blocks"].found(tmp_path, change)


def test_scales_of_zero_give_zeros(tmp_path: Path) -> None:
    def clear(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{MODULE}.0.down_proj.weight_scale_inv"].zero_()

    locations = KINDS["blocks"].found(tmp_path, clear)
    assert numbers_of(locations, filled(locations))[0][2].count_nonzero() == 0


def test_sizes_that_are_no_multiples_of_32_are_refused(tmp_path: Path) -> None:
    locations = Kind(block=(1, 0), hidden=80, inter=64).found(tmp_path)
    with pytest.raises(ConfigError, match=r"quantised experts are \[64, 80\].*multiples of 32: use --weights resident"):
        grouped(locations)


def test_scales_say_where_each_matrix_begins(tmp_path: Path) -> None:
    kind = Kind(block=(128, 128), hidden=256, inter=128)
    kind.found(tmp_path)
    headers = read_header(tmp_path / "model.safetensors")
    names = [f"{MODULE}.{expert}.{name}_proj.weight" for expert in (2, 0) for name in ("gate", "down")]
    scales: StoredScales = read_scales(headers, names, kind.form)
    assert scales.firsts.tolist() == [0, 2, 4, 6]
    tensors = load_file(tmp_path / "model.safetensors")
    assert torch.equal(scales.values, torch.cat([tensors[f"{name}_scale_inv"].flatten() for name in names]))
