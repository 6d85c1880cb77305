"""Experts are found in safetensors files; an error says what is wrong with a file, and a remedy."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sgl_batch.checkpoint.expert_layout import is_expert_weight
from sgl_batch.errors import ConfigError
from sgl_batch.weights.expert_checkpoint import find_experts

HIDDEN, INTER = 10, 6
NAMINGS = {
    "model.layers.{}.mlp.experts": ("gate_proj", "up_proj", "down_proj"),
    "model.layers.{}.block_sparse_moe.experts": ("w1", "w3", "w2"),
}
QWEN = next(iter(NAMINGS))
Tensors = dict[str, torch.Tensor]


def expert(module: str, number: int, dtype: torch.dtype = torch.bfloat16, *, inter: int = INTER) -> Tensors:
    names = next(names for form, names in NAMINGS.items() if form.split("{}")[1] in module)
    shapes = ((inter, HIDDEN), (inter, HIDDEN), (HIDDEN, inter))
    return {
        f"{module}.{number}.{name}.weight": torch.randn(shape).to(dtype)
        for name, shape in zip(names, shapes, strict=True)
    }


def layer(module: str, experts: int = 4, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    made = [expert(module, number, dtype) for number in range(experts)]
    return {name: tensor for one in made for name, tensor in one.items()}


def others() -> Tensors:
    """Other tensors of a checkpoint, of sizes that put experts at odd offsets."""
    return {
        "model.embed_tokens.weight": torch.randn(7, 3).to(torch.bfloat16),
        "model.layers.0.mlp.shared_experts.gate_proj.weight": torch.randn(INTER, HIDDEN),
        "model.layers.0.mlp.gate.weight": torch.randn(5),
    }


def saved(path: Path, *tensors: Tensors) -> str:
    save_file({name: tensor for group in tensors for name, tensor in group.items()}, path, {"format": "pt"})
    return str(path)


def read(file: str, offset: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    size = shape[0] * shape[1] * dtype.itemsize
    data = bytearray(Path(file).read_bytes()[offset : offset + size])
    return torch.frombuffer(data, dtype=dtype).view(shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", NAMINGS)
def test_every_matrix_is_found_at_its_file_offset(form: str, dtype: torch.dtype, tmp_path: Path) -> None:
    modules = [form.format(3), form.format(1)]
    first, second = (layer(module, dtype=dtype) for module in modules)
    name = next(iter(second))
    moved = {name: second.pop(name)}
    files = [
        saved(tmp_path / "a.safetensors", others(), second),
        saved(tmp_path / "b.safetensors", first),
        saved(tmp_path / "c.safetensors", moved),
    ]
    found = find_experts(files, modules, range(1, 4))
    assert (found.files, found.dtype, found.hidden, found.inter) == (files, dtype, HIDDEN, INTER)
    assert found.expert_bytes == 3 * HIDDEN * INTER * dtype.itemsize
    assert found.file_offsets.shape == (2, 3, 3, 2)
    everything = first | second | moved
    for number, module in enumerate(modules):
        for index, which in enumerate(range(1, 4)):
            for part, matrix in enumerate(NAMINGS[form]):
                tensor = everything[f"{module}.{which}.{matrix}.weight"]
                file, offset = found.file_offsets[number, index, part].tolist()
                assert torch.equal(read(files[file], offset, tuple(tensor.shape), dtype), tensor)


def stacked(module: str, experts: int = 4, dtype: torch.dtype = torch.bfloat16, *, inter: int = INTER) -> Tensors:
    """Return a layer's experts as gpt-oss has them, beside biases."""
    shapes = {"gate_up_proj": (HIDDEN, 2 * inter), "down_proj": (inter, HIDDEN)}
    biases = {"gate_up_proj_bias": (2 * inter,), "down_proj_bias": (HIDDEN,)}
    return {f"{module}.{name}": torch.randn(experts, *shape).to(dtype) for name, shape in {**shapes, **biases}.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_expert_of_stacked_ones_is_a_range_of_bytes(dtype: torch.dtype, tmp_path: Path) -> None:
    modules = [QWEN.format(3), QWEN.format(1)]
    layers = [stacked(module, dtype=dtype) for module in modules]
    name = f"{modules[1]}.down_proj"
    files = [
        saved(tmp_path / "a.safetensors", others(), {name: layers[1][name]}),
        saved(tmp_path / "b.safetensors", layers[0], {key: one for key, one in layers[1].items() if key != name}),
    ]
    found = find_experts(files, modules, range(1, 4), stacked=True)
    assert (found.files, found.dtype, found.hidden, found.inter) == (files, dtype, HIDDEN, INTER)
    assert found.transposed
    assert found.expert_bytes == 3 * HIDDEN * INTER * dtype.itemsize
    for number, (module, tensors) in enumerate(zip(modules, layers, strict=True)):
        for index, which in enumerate(range(1, 4)):
            gate, up, down = found.file_offsets[number, index].tolist()
            assert up == [gate[0], gate[1] + dtype.itemsize], "columns of gate and up alternate"
            for (file, offset), key in ((gate, f"{module}.gate_up_proj"), (down, f"{module}.down_proj")):
                expected = tensors[key][which]
                assert torch.equal(read(files[file], offset, tuple(expected.shape), dtype), expected)


def test_only_matrices_of_routed_experts_stay_in_their_files() -> None:
    assert is_expert_weight("model.layers.0.mlp.experts.17.down_proj.weight")
    assert is_expert_weight("model.layers.11.block_sparse_moe.experts.0.w2.weight")
    assert is_expert_weight("model.layers.0.mlp.experts.gate_up_proj")
    assert is_expert_weight("model.layers.0.mlp.experts.down_proj")
    for name in (
        "model.layers.0.mlp.shared_experts.gate_proj.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.experts.gate_up_proj_bias",
        "model.layers.0.mlp.experts.gate_up_proj_blocks",
        "model.layers.0.mlp.experts.3.gate_proj.weight_scale_inv",
    ):
        assert not is_expert_weight(name)


MODULE = QWEN.format(0)


def without(tensors: Tensors, ending: str) -> Tensors:
    left = {name: tensor for name, tensor in tensors.items() if not name.endswith(ending)}
    assert len(left) < len(tensors)
    return left


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            lambda: without(layer(MODULE), ".2.up_proj.weight"),
            r"experts\.2\.gate_proj\.weight .* two companions are not in .*--weights resident",
        ),
        (others, r"experts\.0\.gate_proj\.weight .* are not in .*a matrix of their own for each expert"),
        (
            lambda: layer(MODULE) | expert(MODULE, 3, inter=INTER + 1),
            r"expert 3 of .* has a matrix of BF16\[7, 10\]; .* all alike, here BF16\[6, 10\]: use --weights resident",
        ),
        (
            lambda: layer(MODULE) | expert(MODULE, 3, torch.float32),
            r"expert 3 of .* has a matrix of F32\[6, 10\]; .* here BF16\[6, 10\]",
        ),
        (
            lambda: layer(MODULE, dtype=torch.float16),
            r"the experts' weights are F16 in .*; .* are bf16 or float32, or on a CPU fp8 .* --weights resident",
        ),
        (
            lambda: layer(MODULE) | {f"{MODULE}.1.down_proj.weight": torch.zeros(HIDDEN * INTER)},
            r"experts\.1\.gate_proj\.weight .* two companions",
        ),
    ],
    ids=["a matrix missing", "no experts", "other shape", "other type of one", "type of all", "not a matrix"],
)
def test_a_checkpoint_that_cannot_be_streamed_is_refused_with_a_remedy(
    tensors: Callable[[], Tensors], message: str, tmp_path: Path
) -> None:
    file = saved(tmp_path / "model.safetensors", tensors())
    with pytest.raises(ConfigError, match=message):
        find_experts([file], [MODULE], range(4))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (lambda: layer(MODULE), r"experts\.gate_up_proj and .*experts\.down_proj with an expert 0 are not in .*"),
        (lambda: without(stacked(MODULE), "down_proj"), r"experts\.down_proj with an expert 0 are not in"),
        (lambda: stacked(MODULE, 3), r"with an expert 3 are not in .* one tensor \[experts, .* --weights resident"),
        (lambda: stacked(MODULE) | {f"{MODULE}.gate_up_proj": torch.zeros(4, HIDDEN, 11)}, r"are not in"),
        (
            lambda: stacked(MODULE) | {f"{MODULE}.down_proj": torch.zeros(4, INTER + 1, HIDDEN).to(torch.bfloat16)},
            r"expert 0 of .* has a matrix of BF16\[10, 7\]; .* all alike, here BF16\[10, 6\]",
        ),
        (lambda: stacked(MODULE, dtype=torch.float16), r"the experts' weights are F16 in .*; .* are bf16 or float32"),
    ],
    ids=["not stacked", "a tensor missing", "too few experts", "odd columns", "other shape", "type"],
)
def test_stacked_experts_of_another_form_are_refused(
    tensors: Callable[[], Tensors], message: str, tmp_path: Path
) -> None:
    file = saved(tmp_path / "model.safetensors", tensors())
    with pytest.raises(ConfigError, match=message):
        find_experts([file], [MODULE], range(4), stacked=True)


def test_stacked_experts_are_refused_for_a_model_whose_gate_and_up_do_not_alternate(tmp_path: Path) -> None:
    file = saved(tmp_path / "model.safetensors", stacked(MODULE))
    with pytest.raises(ConfigError, match=r"experts\.0\.gate_proj\.weight .* are not in .*--weights resident"):
        find_experts([file], [MODULE], range(4))


def test_a_checkpoint_of_another_format_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"not in a checkpoint without safetensors files; .*--weights resident"):
        find_experts([], [MODULE], range(4))


def with_header(make: Callable[[dict], object]) -> Callable[[bytes], bytes]:
    """Write a file with another header before the same data."""

    def changed(content: bytes) -> bytes:
        (size,) = struct.unpack("<Q", content[:8])
        text = json.dumps(make(json.loads(content[8 : 8 + size]))).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + size :]

    return changed


def with_entry(**changes: object) -> Callable[[bytes], bytes]:
    """Change one expert's entry in a file's header; None removes a key."""
    name = f"{MODULE}.2.up_proj.weight"

    def make(header: dict) -> object:
        entry = {key: value for key, value in {**header[name], **changes}.items() if value is not None}
        return {**header, name: entry}

    return with_header(make)


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "shorter than the header's length": lambda content: content[:5],
    "cut inside the header": lambda content: content[:300],
    "cut inside the data": lambda content: content[:-1],
    "header of more bytes than memory": lambda content: struct.pack("<Q", 1 << 62) + content[8:],
    "header longer than the file": lambda content: struct.pack("<Q", 1 << 20) + content[8:],
    "header of no bytes": lambda content: struct.pack("<Q", 0) + content[8:],
    "header that is not JSON": lambda content: content[:8] + b"x" + content[9:],
    "header that is not text": lambda content: content[:20] + b"\xff\xfe" + content[22:],
    "header of a hundred thousand brackets": lambda content: struct.pack("<Q", 100_000) + b"[" * 100_000,
    "header that is a list": with_header(lambda header: [header]),
    "entry that is no object": with_header(lambda header: dict.fromkeys(header, 3)),
    "entry without offsets": with_entry(data_offsets=None),
    "entry without shape": with_entry(shape=None),
    "entry without type": with_entry(dtype=None),
    "offsets that are no pair": with_entry(data_offsets=[1]),
    "offsets that are no numbers": with_entry(data_offsets=["0", "120"]),
    "offsets before the data": with_entry(data_offsets=[-120, 0]),
    "offsets behind the data": with_entry(data_offsets=[1 << 40, (1 << 40) + 120]),
    "offsets of another size": with_entry(data_offsets=[0, 121]),
    "shape that is no list": with_entry(shape=6),
    "shape of words": with_entry(shape=["6", "10"]),
    "shape below nothing": with_entry(shape=[-6, -10]),
    "type that is no word": with_entry(dtype=["BF16"]),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_file_is_named(broken: str, tmp_path: Path) -> None:
    file = Path(saved(tmp_path / "broken.safetensors", layer(MODULE)))
    content = file.read_bytes()
    file.write_bytes(BROKEN[broken](content))
    assert file.read_bytes() != content
    with pytest.raises(ConfigError, match=r"broken\.safetensors .*; fetch (it|the file) again"):
        find_experts([str(file)], [MODULE], range(4))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere\.safetensors: No such file"):
        find_experts([str(tmp_path / "nowhere.safetensors")], [MODULE], range(4))
