"""Missing parameters and unused tensors of a checkpoint are named, except those that may be."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from sgl_batch.errors import ConfigError
from sgl_batch.weights import loaded_weights
from sgl_batch.weights.loaded_weights import LoadedWeights

NUM_LAYERS = 2
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


class Layer(nn.Module):
    """A model with a product fused from two tensors, experts, and a scale that it computes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(8, 4, dtype=dtype), requires_grad=False)
        self.experts = nn.Parameter(torch.empty(3, 2, 4, dtype=dtype), requires_grad=False)
        self.norm = nn.Parameter(torch.empty(4, dtype=dtype), requires_grad=False)
        self.attn = nn.Module()
        self.attn.k_scale = nn.Parameter(torch.tensor(1.0), requires_grad=False)


class Model(nn.Module):
    """Load by name as SGLang's models do, and ignore unknown names."""

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
        elif part[2] == "scaled_norm":
            layer.norm.data.copy_(weight)


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
def test_a_checkpoint_that_fits_loads_unchanged(threads: bool) -> None:
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


def test_large_tensors_are_copied_by_what_is_given_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_weights, "_LARGE_BYTES", 2 * 4 * 4)  # of an expert
    copied: list[tuple[int, ...]] = []

    def copy(to: Tensor, source: Tensor) -> None:
        copied.append(tuple(source.shape))
        to[:] = source + 1

    weights = checkpoint()
    for layer in range(NUM_LAYERS):
        weights[f"layers.{layer}.experts.0"] = weights[f"layers.{layer}.experts.0"].t().contiguous().t()
        weights[f"layers.{layer}.experts.2"] = weights[f"layers.{layer}.experts.2"].double()
    model = Model(torch.float32)
    watch = LoadedWeights(NUM_LAYERS, is_tied=False, is_elsewhere=lambda _: False, copy=copy)
    watch.load(model, weights.items(), model.load_weights)
    assert copied == [(4, 4), (2, 4)] * NUM_LAYERS, "strided tensors and those of other types are torch's"
    for number, layer in enumerate(model.layers):
        for expert, more in enumerate((0, 1, 0)):
            assert torch.equal(layer.experts[expert], (weights[f"layers.{number}.experts.{expert}"] + more).float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("absent", "names"),
    [
        ("layers.1.norm", "layers.1.norm"),
        ("layers.0.experts.1", r"layers.0.experts \(experts 1\)"),
        ("layers.1.up", r"layers.1.gate_up \(4 of 8 rows\)"),
    ],
)
def test_parameters_missing_in_a_checkpoint_are_named(absent: str, names: str, dtype: torch.dtype) -> None:
    weights = {name: one.nan_to_num(1.0) if dtype.itemsize > 1 else one for name, one in checkpoint(dtype).items()}
    if dtype.itemsize == 1:  # any NaN is a mark, and no weight is NaN
        weights |= {f"layers.{layer}.norm": torch.ones(4).to(dtype) for layer in range(NUM_LAYERS)}
    del weights[absent]
    with pytest.raises(ConfigError, match=f"it has nothing for 1 parameters of the model: {names}. Its answers"):
        load(weights)


@pytest.mark.parametrize("threads", [False, True])
def test_unused_tensors_of_a_checkpoint_are_named(threads: bool) -> None:
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


PACKED = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


class Packed(nn.Module):
    """A model of one parameter, of which `load_weights` fills the slices `loaded`."""

    def __init__(self, data: Tensor, loaded: tuple[slice, ...], name: str = "qweight") -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(data, requires_grad=False))
        self.loaded = loaded

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            self.get_parameter(name).data[self.loaded] = weight[self.loaded]

    def load(self, numbers: Tensor) -> None:
        watch = LoadedWeights(1, is_tied=False, is_elsewhere=lambda name: False)
        [name] = [name for name, _ in self.named_parameters()]
        watch.load(self, [(name, numbers)], self.load_weights)


@pytest.mark.parametrize("dtype", PACKED, ids=str)
@pytest.mark.parametrize(
    ("loaded", "names"),
    [
        ((slice(0), slice(None), slice(None)), "qweight"),
        ((slice(1, 4), slice(None), slice(None)), r"qweight \(experts 0\)"),
        ((slice(None), slice(32), slice(None)), r"qweight \(experts 0, 1, 2, 3\)"),
        ((slice(None), slice(None), slice(3)), "qweight"),
        ((slice(None), slice(None), slice(3, None)), "qweight"),
    ],
)
def test_packed_weights_that_are_not_loaded_are_named(
    dtype: torch.dtype, loaded: tuple[slice, ...], names: str
) -> None:
    numbers = torch.zeros(4, 40, 6, dtype=dtype)
    with pytest.raises(ConfigError, match=f"nothing for 1 parameters of the model: {names}. Its answers"):
        Packed(torch.empty(4, 40, 6, dtype=dtype), loaded).load(numbers)
    Packed(torch.empty(4, 40, 6, dtype=dtype), (slice(None),)).load(numbers)


@pytest.mark.parametrize("dtype", PACKED, ids=str)
@pytest.mark.parametrize("shape", [(100,), (3, 50)])
def test_packed_weights_of_few_rows_are_marked_in_all_numbers(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="nothing for 1 parameters"):
        Packed(torch.empty(shape, dtype=dtype), (slice(0),)).load(torch.zeros(shape, dtype=dtype))
    Packed(torch.empty(shape, dtype=dtype), (slice(None),)).load(torch.zeros(shape, dtype=dtype))


def test_a_checkpoints_numbers_are_not_taken_for_a_mark() -> None:
    torch.manual_seed(0)
    for dtype in (torch.uint8, torch.int8):
        for numbers in (torch.randint(0, 127, (1 << 20, 2)), torch.arange(1 << 21).reshape(-1, 2) % 251):
            Packed(torch.empty(1 << 20, 2, dtype=dtype), (slice(None),)).load(numbers.to(dtype))
    single = torch.empty(3, dtype=torch.uint8)  # too few bits to tell
    Packed(single, (slice(0),)).load(torch.zeros(3, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_parameters_are_marked_in_any_memory_layout(dtype: torch.dtype) -> None:
    for data in (
        torch.empty(12, 40, dtype=dtype).t(),
        torch.empty(40, 24, dtype=dtype)[:, ::2],
    ):
        numbers = torch.ones(40, 12).to(dtype)
        with pytest.raises(ConfigError, match=r"nothing for 1 parameters of the model: qweight \(20 of 40 rows\)"):
            Packed(data.clone(memory_format=torch.preserve_format), (slice(20),)).load(numbers)
        Packed(data, (slice(None),)).load(numbers)
    alike = torch.zeros(1, 12).to(dtype).expand(40, 12)  # forty rows that share the memory of one
    Packed(alike, (slice(0),)).load(torch.ones(40, 12).to(dtype))


def test_packed_weights_may_lack_optional_parts_but_need_finite_scales() -> None:
    Packed(torch.full((64,), -1, dtype=torch.int32), (slice(0),), "g_idx").load(torch.zeros(64, dtype=torch.int32))
    for spoiled in ("nan", "inf"):
        numbers = torch.ones(4, 8, dtype=torch.bfloat16)
        numbers[2, 3] = float(spoiled)
        with pytest.raises(ConfigError, match=r"^1 scales of the checkpoint's weights hold .*: scales\."):
            Packed(torch.empty(4, 8, dtype=torch.bfloat16), (slice(None),), "scales").load(numbers)
    Packed(torch.empty(4, 8), (slice(None),), "weight_scale_inv").load(torch.ones(4, 8))
    with pytest.raises(ConfigError, match="nothing for 1 parameters of the model: weight_scale_inv"):
        Packed(torch.empty(4, 8), (slice(0),), "weight_scale_inv").load(torch.ones(4, 8))


def touched(model: Model, layer: int) -> bool:
    return bool(model.layers[layer].experts.data.count_nonzero())


def test_a_layer_is_written_to_when_its_weights_come_where_they_belong_to_layers() -> None:
    model, weights, seen = Model(torch.float32), checkpoint(), []
    for layer in model.layers:
        for one in layer.parameters():
            one.data.zero_()

    def coming() -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights.items():
            seen.append((name, touched(model, 1)))
            yield name, weight

    by_layer = LoadedWeights(NUM_LAYERS, is_tied=False, is_elsewhere=lambda _: False, by_layer=lambda _: lambda _: True)
    by_layer.load(model, coming(), model.load_weights)
    assert not any(is_touched for name, is_touched in seen if name.startswith("layers.0."))
    assert model.layers[1].experts[1].tolist() == weights["layers.1.experts.1"].tolist()


@pytest.mark.parametrize("absent", ["layers.1.", "layers.1.experts.1"])
def test_layers_whose_weights_never_come_are_named_as_well(absent: str) -> None:
    weights = {name: one for name, one in checkpoint().items() if not name.startswith(absent)}
    by_layer = LoadedWeights(NUM_LAYERS, is_tied=False, is_elsewhere=lambda _: False, by_layer=lambda _: lambda _: True)
    model = Model(torch.float32)
    with pytest.raises(ConfigError, match=r"it has nothing for [13] parameters of the model: layers\.1"):
        by_layer.load(model, weights.items(), model.load_weights)


def test_a_tensor_of_a_numbered_part_that_is_no_layer_may_be_of_any() -> None:
    model, found = Model(torch.float32), []
    for layer in model.layers:
        layer.experts.data.zero_()

    def load_weights(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            found.append(touched(model, 1))
            model.load_weights([(name.replace("h.", "layers."), weight)])

    by_layer = LoadedWeights(NUM_LAYERS, is_tied=False, is_elsewhere=lambda _: False, by_layer=lambda _: lambda _: True)
    other_names = {name.replace("layers.", "h."): one for name, one in checkpoint().items()}
    by_layer.load(model, {"embed.weight": torch.ones(1), **other_names}.items(), _using_all(load_weights))
    assert found[:2] == [False, True]


def _using_all(load_weights: Callable[[Iterable[tuple[str, Tensor]]], None]) -> Callable[..., None]:
    """Return `load_weights` that also reads each tensor, as if the model had a place for it."""
    return lambda weights: load_weights((name, weight) for name, weight in weights if weight.sum() is not None)


def test_large_parameters_take_their_memory_before_they_are_marked_and_keep_what_they_hold() -> None:
    large = torch.arange(5 << 20, dtype=torch.float64)
    loaded_weights._take_memory([large, torch.ones(3), torch.ones(4, 6).t()])
    assert bool((large == torch.arange(5 << 20)).all())


class Adopted:
    """Notes which layers are adopted, and when; gives adopted experts another form, or fails with `error`."""

    def __init__(self, error: Exception | None = None, only: str = "") -> None:
        self.error, self.only = error, only
        self.names: list[list[str]] = []
        self.coming = ""
        self.when: list[str] = []
        self.places: list[int] = []

    def __call__(self, model: nn.Module, names: Collection[str]) -> None:
        if self.error is not None:
            raise self.error
        self.names.append(sorted(names))
        self.when.append(self.coming)
        (layer,) = {int(name.split(".")[1]) for name in names}
        experts = model.get_parameter(f"layers.{layer}.experts")
        self.places.append(experts.data_ptr())
        experts.data = experts.data.double() * 2

    def load(self, weights: Iterable[tuple[str, Tensor]], *, threads: bool = False) -> Model:
        model = Model(torch.float32)
        by_layer = LoadedWeights(
            NUM_LAYERS,
            is_tied=False,
            is_elsewhere=lambda _: False,
            by_layer=lambda _: lambda name: name.endswith(self.only),
            adopt=self,
        )
        with ThreadPoolExecutor(1) as pool:
            model.threads = pool if threads else None
            by_layer.load(model, self._noted(weights), model.load_weights)
        return model

    def _noted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights:
            self.coming = name
            yield name, weight


LAYER_0 = ["layers.0.experts", "layers.0.gate_up", "layers.0.norm"]


def test_a_layer_is_adopted_when_it_is_whole_and_the_next_one_comes() -> None:
    adopted, weights = Adopted(), checkpoint()
    model = adopted.load(weights.items())
    assert adopted.names == [LAYER_0]
    assert adopted.when == ["layers.1.gate"]
    assert model.layers[0].experts.tolist() == [(2 * weights[f"layers.0.experts.{i}"]).tolist() for i in range(3)]
    assert model.layers[1].experts.dtype == torch.float32


def test_of_some_parameters_alone_a_layer_is_adopted_whatever_else_of_it_comes_later() -> None:
    weights, adopted = checkpoint(), Adopted(only="experts")
    rest = {name: weights.pop(name) for name in ["layers.0.up", "layers.1.norm"]}
    model = adopted.load([*weights.items(), *rest.items()])
    # Each while others are loaded: the thread that adopts may be later than what comes next.
    assert adopted.names == [["layers.0.experts"], ["layers.1.experts"]]
    assert torch.equal(model.layers[0].gate_up[4:], rest["layers.0.up"].t().contiguous().t())
    del rest["layers.0.up"]
    with pytest.raises(ConfigError, match=r"layers\.0\.gate_up"):
        Adopted(only="experts").load([*weights.items(), *rest.items()])


def test_experts_take_the_memory_that_adopted_ones_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "NUM_LAYERS", 3)
    adopted, weights = Adopted(), checkpoint()
    model = adopted.load(weights.items())
    # The second layer takes the first one's memory only where that has been adopted by then; the third has some left.
    assert len({*adopted.places[:2], model.layers[2].experts.data_ptr()}) < 3
    for number, layer in enumerate(model.layers):
        expected = torch.stack([weights[f"layers.{number}.experts.{i}"] for i in range(3)])
        assert torch.equal(layer.experts, expected if number == 2 else expected.double() * 2)


def test_a_layer_in_two_files_is_adopted_once_its_rest_is_loaded() -> None:
    weights = checkpoint()
    rest = {name: weights.pop(name) for name in ["layers.0.up", "layers.0.experts.2"]}
    adopted = Adopted()
    adopted.load([*weights.items(), *rest.items(), ("rotary_emb.inv_freq", torch.ones(1))])
    assert [names[0].split(".")[1] for names in adopted.names] == ["1", "0"]


def test_a_layer_that_another_thread_loads_is_left_to_the_end() -> None:
    adopted = Adopted()
    adopted.load(checkpoint().items(), threads=True)
    assert adopted.names == []


def test_missing_and_unused_tensors_are_named_also_of_models_whose_layers_are_adopted() -> None:
    weights = checkpoint()
    del weights["layers.1.experts.1"]
    with pytest.raises(
        ConfigError, match=r"layers\.1\.experts \(experts 1\).*no place for 1 of its tensors: layers\.0\.x"
    ):
        Adopted().load({**weights, "layers.0.x": torch.ones(1)}.items())


def test_a_tensor_that_comes_again_when_its_layer_is_adopted_is_loaded_but_for_matrices() -> None:
    norm = "layers.0.scaled_norm", torch.full((4,), 7.0)
    weights = [norm, *checkpoint().items(), norm]
    assert Adopted().load(weights).layers[0].norm.tolist() == [7.0] * 4
    for name, again in (("layers.0.experts.1", torch.ones(2, 4)), ("layers.0.gate", torch.ones(4, 4))):
        with pytest.raises(ConfigError, match=rf"has {re.escape(name)} twice"):
            Adopted().load([*weights, (name, again)])


def test_what_adoption_reports_ends_the_load() -> None:
    with pytest.raises(ConfigError, match="no room for scales"):
        Adopted(ConfigError("no room for scales")).load(checkpoint().items())
