"""Whatever a checkpoint lacks and whatever a model has no place for is named; what may be so is passed over."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from sgl_batch.errors import ConfigError
from sgl_batch.model_executor.loaded_weights import LoadedWeights

NUM_LAYERS = 2
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


class Layer(nn.Module):
    """A fused product of two tensors, experts, and a scale that the model computes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(8, 4, dtype=dtype), requires_grad=False)
        self.experts = nn.Parameter(torch.empty(3, 2, 4, dtype=dtype), requires_grad=False)
        self.norm = nn.Parameter(torch.empty(4, dtype=dtype), requires_grad=False)
        self.attn = nn.Module()
        self.attn.k_scale = nn.Parameter(torch.tensor(1.0), requires_grad=False)


class Model(nn.Module):
    """Loads by name as SGLang's models do, and passes over what it does not know."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(dtype) for _ in range(NUM_LAYERS))
        self.threads: ThreadPoolExecutor | None = None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            if self.threads is None:
                self._load(name, weight)
            else:
                self.threads.submit(self._load, name, weight).result()

    def _load(self, name: str, weight: Tensor) -> None:
        part = name.split(".")
        if part[0] != "layers" or int(part[1]) >= NUM_LAYERS:
            return
        layer = self.layers[int(part[1])]
        if part[2] == "gate":
            layer.gate_up.data.narrow(0, 0, 4).copy_(weight.narrow(0, 0, 4))
        elif part[2] == "up":
            layer.gate_up.data[4:] = weight.t().contiguous().t()
        elif part[2] == "experts":
            layer.experts.data[int(part[3])].copy_(weight)
        elif part[2] == "norm":
            layer.norm.data = weight


def checkpoint(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    made = {}
    for layer in range(NUM_LAYERS):
        made[f"layers.{layer}.gate"] = torch.randn(4, 4).to(dtype)
        made[f"layers.{layer}.up"] = torch.randn(4, 4).to(dtype)
        made[f"layers.{layer}.norm"] = torch.full((4,), float("nan")).to(dtype)  # no mark
        for expert in range(3):
            made[f"layers.{layer}.experts.{expert}"] = torch.randn(2, 4).to(dtype)
    return made


def load(weights: dict[str, Tensor], *, is_tied: bool = False, elsewhere: str = "", threads: bool = False) -> Model:
    model = Model(weights["layers.0.gate"].dtype)
    watch = LoadedWeights(NUM_LAYERS, is_tied=is_tied, is_elsewhere=lambda name: bool(elsewhere) and elsewhere in name)
    with ThreadPoolExecutor(1) as pool:
        model.threads = pool if threads else None
        watch.load(model, weights.items(), model.load_weights)
    return model


@pytest.mark.parametrize("threads", [False, True])
def test_a_checkpoint_that_fits_loads_with_its_very_numbers(threads: bool) -> None:
    weights = checkpoint()
    model = load(weights, threads=threads)
    for number, layer in enumerate(model.layers):
        assert layer.gate_up.tolist() == [
            *weights[f"layers.{number}.gate"].tolist(),
            *weights[f"layers.{number}.up"].tolist(),
        ]
        assert layer.experts[1].tolist() == weights[f"layers.{number}.experts.1"].tolist()
        assert type(layer.norm.data) is Tensor, "a parameter is still a tensor of the checkpoint"
        assert layer.attn.k_scale.item() == 1.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("absent", "said"),
    [
        ("layers.1.norm", "layers.1.norm"),
        ("layers.0.experts.1", r"layers.0.experts \(experts 1\)"),
        ("layers.1.up", r"layers.1.gate_up \(4 of 8 rows\)"),
    ],
)
def test_what_a_checkpoint_lacks_is_named(absent: str, said: str, dtype: torch.dtype) -> None:
    weights = {name: one.nan_to_num(1.0) if dtype.itemsize > 1 else one for name, one in checkpoint(dtype).items()}
    if dtype.itemsize == 1:  # any NaN is a mark there, and none is a weight
        weights |= {f"layers.{layer}.norm": torch.ones(4).to(dtype) for layer in range(NUM_LAYERS)}
    del weights[absent]
    with pytest.raises(ConfigError, match=f"it has nothing for 1 parameters of the model: {said}. Its answers"):
        load(weights)


@pytest.mark.parametrize("threads", [False, True])
def test_what_a_model_has_no_place_for_is_named(threads: bool) -> None:
    strange = {f"layers.0.strange.{number}": torch.zeros(2) for number in range(8)}
    with pytest.raises(ConfigError, match=r"no place for 8 of its tensors: layers.0.strange.0, .*strange.5 and 2 more"):
        load({**checkpoint(), **strange}, threads=threads)


def test_layers_beyond_the_model_tables_tied_embeddings_and_other_ranks_experts_may_stay_unused() -> None:
    beyond = {f"model.layers.{NUM_LAYERS}.eh_proj.weight": torch.zeros(2), "mtp.fc.weight": torch.zeros(2)}
    tables = {"layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    load({**checkpoint(), **beyond, **tables})
    tied = {**checkpoint(), "lm_head.weight": torch.zeros(2)}
    load(tied, is_tied=True)
    with pytest.raises(ConfigError, match=r"no place for 1 of its tensors: lm_head\.weight"):
        load(tied)
    load({**checkpoint(), "layers.0.others.1": torch.zeros(2)}, elsewhere="others")
