"""A model whose experts stay in their files takes no memory for them; wrong files or too little memory are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from expert_modules import Experts, expert_layers
from safetensors.torch import save_file

pytest.importorskip("sgl_batch_kernel.expert_loader")

from sgl_batch.config import MemoryConfig
from sgl_batch.errors import ConfigError
from sgl_batch.kernel_loader import native_kernels
from sgl_batch.metrics.counters import Counters
from sgl_batch.weights import model_experts, streamed_weights
from sgl_batch.weights.unloaded_experts import is_expert_parameter, unloaded_experts

LAYERS, EXPERTS, HIDDEN, INTER = 3, 4, 16, 8
EXPERT_BYTES = 3 * HIDDEN * INTER * 2


class Layer(torch.nn.Module):
    def __init__(self, experts: int, dtype: torch.dtype, inter: int) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(HIDDEN, EXPERTS)
        self.experts = Experts(experts, dtype, hidden=HIDDEN, inter=inter)


def model(experts: int = EXPERTS, dtype: torch.dtype = torch.bfloat16, inter: int = INTER) -> torch.nn.Module:
    with unloaded_experts():
        return torch.nn.ModuleDict({"layers": torch.nn.ModuleList(Layer(experts, dtype, inter) for _ in range(LAYERS))})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    file: Path = tmp_path_factory.mktemp("checkpoint") / "model.safetensors"
    shapes = {"gate_proj": (INTER, HIDDEN), "up_proj": (INTER, HIDDEN), "down_proj": (HIDDEN, INTER)}
    tensors = {
        f"layers.{layer}.experts.{expert}.{name}.weight": torch.randn(shape).to(torch.bfloat16)
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
        for name, shape in shapes.items()
    }
    save_file(tensors, file)
    return [str(file)]


@pytest.fixture(autouse=True)
def these_are_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_experts, "expert_layers", expert_layers)


def stream(model: torch.nn.Module, files: list[str], memory: int = 0, *, rank: int = 0, int8: bool = False) -> Any:
    kernels = native_kernels()
    assert kernels is not None
    return streamed_weights.stream_experts(
        model,
        files,
        MemoryConfig(weights="streamed", weight_memory=memory),
        expert_shard=rank,
        int8=int8,
        kernels=kernels,
        counters=Counters(),
    )


def test_experts_in_their_files_take_no_memory_and_keep_their_shape() -> None:
    built = model()
    weights = {name: parameter for name, parameter in built.named_parameters() if is_expert_parameter(name)}
    assert len(weights) == 2 * LAYERS
    assert all(weight.untyped_storage().nbytes() == 2 for weight in weights.values())
    assert tuple(weights["layers.0.experts.w13_weight"].shape) == (EXPERTS, 2 * INTER, HIDDEN)
    with pytest.raises(RuntimeError, match="single memory location"):
        weights["layers.0.experts.w2_weight"].copy_(torch.ones(EXPERTS, HIDDEN, INTER))
    gate = built.get_parameter("layers.0.gate.weight")
    assert gate.untyped_storage().nbytes() == gate.numel() * 4
    after = Experts(EXPERTS, torch.bfloat16, hidden=HIDDEN, inter=INTER)
    assert after.w2_weight.untyped_storage().nbytes() == after.w2_weight.numel() * 2, (
        "outside, parameters have all their memory"
    )


@pytest.mark.parametrize(
    ("memory", "int8", "slots"),
    [
        (0, False, LAYERS * EXPERTS),
        (0, True, LAYERS * EXPERTS),
        (9 * EXPERT_BYTES + 5, False, 9),
        (5 * EXPERT_BYTES, True, 10),
        (1 << 30, False, LAYERS * EXPERTS),
    ],
)
def test_slots_default_to_all_experts_and_never_exceed_them(
    memory: int, int8: bool, slots: int, files: list[str]
) -> None:
    assert stream(model(), files, memory, int8=int8).slots.tensors.count == slots


def test_a_rank_streams_its_share(files: list[str]) -> None:
    half = EXPERTS // 2
    streamer = stream(model(half), files, rank=1)
    slots = streamer.slots
    slots.ask(2, [0], urgent=True)
    slots.wait(2, [0])
    first = stream(model(), files).slots
    first.ask(2, [half], urgent=True)
    first.wait(2, [half])
    held, expected = (
        pool.tensors.w2[int(pool.table.slot_of[2, number])] for pool, number in ((slots, 0), (first, half))
    )
    assert torch.equal(held, expected)


@pytest.mark.parametrize(
    ("built", "memory", "message"),
    [
        (torch.nn.Identity, 0, "Identity has no unquantised experts to stream: use --weights resident"),
        (
            model,
            4 * EXPERT_BYTES - 1,
            rf"weight_memory is {4 * EXPERT_BYTES - 1} bytes; memory for 3 experts is less than the 4 of a layer, "
            rf"which are {4 * EXPERT_BYTES} bytes: .*, better {8 * EXPERT_BYTES}, and up to {12 * EXPERT_BYTES}",
        ),
        (
            lambda: model(dtype=torch.float32),
            0,
            r"computes in torch\.float32 and its experts .* as torch\.bfloat16; .* give --dtype bfloat16",
        ),
        (lambda: model(inter=2 * INTER), 0, r"experts are \[8, 16\] and the model's \[16, 16\]: its config\.json"),
        (lambda: model(experts=EXPERTS + 1), 0, r"layers\.0\.experts\.4\.gate_proj\.weight .* are not in"),
    ],
    ids=["no experts", "too little memory", "other number type", "other size", "other number"],
)
def test_a_model_that_cannot_be_streamed_is_refused_with_a_remedy(
    built: Any, memory: int, message: str, files: list[str]
) -> None:
    with pytest.raises(ConfigError, match=message):
        stream(built(), files, memory)
