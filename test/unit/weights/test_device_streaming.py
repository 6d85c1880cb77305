"""Experts that a GPU fetches from host memory compute as resident ones do, even if copies are late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prefetch_streams import Stream
from safetensors.torch import save_file

from host_syncs import HostSyncs
from sgl_batch.config import MemoryConfig
from sgl_batch.core.start_choices import Choice
from sgl_batch.core.weight_residency import plan_residency
from sgl_batch.errors import ConfigError
from sgl_batch.layers.moe.clamped_experts import ClampedExperts
from sgl_batch.layers.moe.cpu_experts import combined_experts
from sgl_batch.metrics.counters import Counters
from sgl_batch.model_executor.gpu_experts import GpuExperts
from sgl_batch.sglang_adapter.layers import UnquantizedFusedMoEMethod
from sgl_batch.weights import model_experts
from sgl_batch.weights.device_expert_slots import DeviceExpertSlots
from sgl_batch.weights.expert_checkpoint import find_experts
from sgl_batch.weights.expert_slots import SlotTensors
from sgl_batch.weights.host_experts import HostExperts, read_experts
from sgl_batch.weights.unloaded_experts import unloaded_experts
from sgl_batch.weights.weight_streamer import WeightStreamer, plain_compute

LAYERS, EXPERTS, TOP_K, HIDDEN, INTER = 5, 12, 3, 16, 8
MANY, FEW = 40, 2
ALL = LAYERS * EXPERTS
MEMORY = (EXPERTS, EXPERTS + 3, 2 * EXPERTS, 2 * EXPERTS + 4 * (LAYERS - 2), ALL - 1, ALL)


def _draw_clamped(dice: torch.Generator) -> ClampedExperts:
    w13_bias, w2_bias = (torch.randn(EXPERTS, size, generator=dice) for size in (2 * INTER, HIDDEN))
    return ClampedExperts(w13_bias=w13_bias, w2_bias=w2_bias, alpha=1.7, limit=7.0)


class Model:
    """Layers of experts in host memory, with device memory for `slots` of them. `clamped`: they have biases."""

    def __init__(self, slots: int, *, late: bool, runner: Any = combined_experts, clamped: bool = False) -> None:
        self.dice = torch.Generator().manual_seed(slots)
        self._clamped = _draw_clamped(self.dice) if clamped else None
        self.host = HostExperts(
            w13=torch.randn(LAYERS, EXPERTS, 2 * INTER, HIDDEN, generator=self.dice),
            w2=torch.randn(LAYERS, EXPERTS, HIDDEN, INTER, generator=self.dice),
        )
        nan = float("nan")  # shows a read before its copy
        tensors = SlotTensors(
            w13=torch.full((slots, 2 * INTER, HIDDEN), nan), w2=torch.full((slots, HIDDEN, INTER), nan)
        )
        self.stream = Stream(late=late)
        self.slots = DeviceExpertSlots(self.host, tensors, self.stream)
        self.counters = Counters()
        self._keys = [torch.empty(1) for _ in range(LAYERS)]
        self._streamer = WeightStreamer(
            self.slots,
            plan_residency(slots, layers=LAYERS, experts=EXPERTS),
            self._keys,
            compute=plain_compute(runner, self.slots),
            counters=self.counters,
            reads_routing=False,
        )

    def compute(self, layer: int, ids: torch.Tensor) -> None:
        """Make an expert call of rows that chose `ids`."""
        x, weights = ids.new_ones((len(ids), HIDDEN)).float(), ids.float()
        self._streamer.experts(x, self._keys[layer], x, weights, ids)

    def visit(self, layer: int, rows: int) -> None:
        """Make an expert call, and compare it with that of resident weights."""
        ids = torch.stack([torch.randperm(EXPERTS, generator=self.dice)[:TOP_K] for _ in range(rows)])
        ids[torch.rand(ids.shape, generator=self.dice) < 0.05] = -1
        x, weights = torch.randn(rows, HIDDEN, generator=self.dice), torch.rand(ids.shape, generator=self.dice)
        clamped = self._clamped
        found = self._streamer.experts(x, self._keys[layer], torch.empty(0), weights, ids, clamped=clamped)
        expected = combined_experts(x, self.host.w13[layer], self.host.w2[layer], weights, ids, clamped=clamped)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1]), "rows are counted by expert, wherever it lies"
        held = self.slots.table.slot_of[self.slots.table.slot_of >= 0].tolist()
        assert len(set(held)) == len(held), "no slot holds two experts"
        assert self.slots.table.num_free + len(held) == self.slots.table.num_slots, "and none is lost"


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("slots", MEMORY)
def test_results_are_those_of_resident_weights(slots: int, late: bool) -> None:
    model = Model(slots, late=late)
    for rows in (MANY, FEW, MANY, MANY, 1, FEW, FEW, MANY):
        for layer in range(LAYERS):
            model.visit(layer, rows)
    counts = model.counters.counts
    assert 0 < counts["weights_read"] <= counts["weights_routed"] + counts["weights_unrouted"] + 2 * EXPERTS
    assert counts["weights_bytes_read"] == counts["weights_read"] * model.host.expert_bytes
    if slots == ALL:
        assert counts["weights_read"] == ALL, "each expert once"


def test_experts_in_any_slots_have_their_own_biases() -> None:
    model = Model(EXPERTS + 3, late=True, clamped=True)
    for rows in (MANY, FEW, FEW, MANY):
        for layer in range(LAYERS):
            model.visit(layer, rows)


def test_a_large_group_fetches_all_experts_and_a_small_one_those_it_uses() -> None:
    model = Model(2 * EXPERTS, late=True)
    for layer in range(LAYERS):
        model.visit(layer, MANY)
    for layer in range(LAYERS):
        model.visit(layer, MANY)
    assert model.counters.counts["weights_routed"] == (2 * LAYERS - 1) * EXPERTS, "all, whatever was chosen"
    before = model.counters.counts["weights_read"]
    for layer in range(LAYERS):
        model.visit(layer, 1)
    assert model.counters.counts["weights_read"] - before <= EXPERTS + LAYERS * TOP_K, "one layer was being read ahead"


def test_neighbouring_experts_are_fetched_by_one_copy() -> None:
    slots = Model(ALL, late=False).slots
    stream: Any = slots._stream
    slots.ask(0, list(reversed(range(EXPERTS))), urgent=True)
    assert stream.num_copies == 2, "of gate and up together, and of down"
    slots.free(0, [3, 4, 7])
    slots.ask(1, [9, 5, 1, 2, 6], urgent=False)
    copied = 2 * len([[1, 2], [5], [6], [9]])
    assert slots.table.slots(1, [1, 2, 5, 6, 9]).tolist() == [3, 4, 7, EXPERTS, EXPERTS + 1]
    assert stream.num_copies == 2 + copied
    slots.ask(2, range(EXPERTS), urgent=False)
    assert stream.num_copies == 2 + copied + 2
    for layer, experts in ((0, [0, 1, 2, 5, 6, 8, 9, 10, 11]), (1, [1, 2, 5, 6, 9]), (2, range(EXPERTS))):
        for expert, slot in zip(experts, slots.table.slots(layer, experts).tolist(), strict=True):
            assert torch.equal(slots.tensors.w13[slot], slots._host.w13[layer, expert])
            assert torch.equal(slots.tensors.w2[slot], slots._host.w2[layer, expert])


def test_the_host_reads_the_routing_of_small_groups_only() -> None:
    def runner(x: torch.Tensor, w13: torch.Tensor, *others: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return x, torch.zeros(len(w13), device=x.device)

    groups = [torch.randint(EXPERTS, (rows, TOP_K)) for rows in (MANY, FEW)]
    with HostSyncs() as syncs:
        model = Model(2 * EXPERTS, late=True, runner=runner)
        for layer in range(LAYERS):
            model.compute(layer, groups[0])
        assert not syncs.take()
        for layer in range(LAYERS):
            model.compute(layer, groups[1])
        found = syncs.take()
    assert [(sync.kind, times) for sync, times in found.items()] == [(".tolist", LAYERS)]


def test_host_memory_is_pinned_until_the_slots_are_closed() -> None:
    model = Model(EXPERTS, late=False)
    assert model.stream.pinned == {model.host.w13.data_ptr(), model.host.w2.data_ptr()}
    model.slots.close()
    assert model.stream.pinned == set()


@pytest.fixture
def checkpoint(tmp_path: Any) -> Any:
    """Write a file of three layers of four experts; keep their weights."""
    tensors = {
        f"layers.{layer}.experts.{expert}.{name}.weight": torch.randn(shape)
        for layer in range(3)
        for expert in range(4)
        for name, shape in {
            "gate_proj": (INTER, HIDDEN),
            "up_proj": (INTER, HIDDEN),
            "down_proj": (HIDDEN, INTER),
        }.items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return SimpleNamespace(file=tmp_path / "model.safetensors", tensors=tensors)


MODULES = [f"layers.{layer}.experts" for layer in range(3)]


def test_experts_are_read_unchanged_from_the_checkpoint(checkpoint: Any) -> None:
    host = read_experts(find_experts([str(checkpoint.file)], MODULES, range(2, 4)), 2)
    for layer in range(3):
        for index, expert in enumerate((2, 3)):
            gate, up, down = (
                checkpoint.tensors[f"layers.{layer}.experts.{expert}.{name}.weight"]
                for name in ("gate_proj", "up_proj", "down_proj")
            )
            assert torch.equal(host.w13[layer, index], torch.cat([gate, up]))
            assert torch.equal(host.w2[layer, index], down)


def test_stacked_experts_are_read_with_rows_of_gate_and_up_that_alternate(tmp_path: Any) -> None:
    tensors = {
        f"{module}.{name}": torch.randn(4, *shape)
        for module in MODULES
        for name, shape in {"gate_up_proj": (HIDDEN, 2 * INTER), "down_proj": (INTER, HIDDEN)}.items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    host = read_experts(find_experts([str(tmp_path / "model.safetensors")], MODULES, range(2, 4), stacked=True), 2)
    for layer, module in enumerate(MODULES):
        assert torch.equal(host.w13[layer], tensors[f"{module}.gate_up_proj"][2:].transpose(1, 2))
        assert torch.equal(host.w2[layer], tensors[f"{module}.down_proj"][2:].transpose(1, 2))


def test_a_file_that_has_become_shorter_is_named(checkpoint: Any) -> None:
    locations = find_experts([str(checkpoint.file)], MODULES, range(4))
    checkpoint.file.write_bytes(checkpoint.file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors ends 100 bytes too soon"):
        read_experts(locations, 2)


class Experts(torch.nn.Module):
    """A layer of experts as SGLang's; its own runner must not be called."""

    def __init__(self) -> None:
        super().__init__()
        self.w13_weight = torch.nn.Parameter(torch.zeros(4, 2 * INTER, HIDDEN), requires_grad=False)
        self.w2_weight = torch.nn.Parameter(torch.zeros(4, HIDDEN, INTER), requires_grad=False)
        method = UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod)
        torch.nn.Module.__init__(method)
        plain = {"activation": "silu", "apply_router_weight_on_input": False, "routed_scaling_factor": None}
        plain |= {"gemm1_alpha": None, "gemm1_clamp_limit": None, "gate_up_interleaved": True}
        method.moe_runner_config = SimpleNamespace(**plain)
        self.quant_method = method


def not_settled(*_: object) -> Choice:
    raise AssertionError("a runner that is chosen by a flag is not measured")


def test_a_models_experts_stay_on_the_host_and_are_streamed(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def expert_layers(model: torch.nn.Module) -> list[Experts]:
        return [module for module in model.modules() if isinstance(module, Experts)]

    monkeypatch.setattr(model_experts, "expert_layers", expert_layers)
    with unloaded_experts():
        layers = [torch.nn.ModuleDict({"experts": Experts()}) for _ in range(3)]
        model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})
    gpu = GpuExperts("torch", Counters(), not_settled, lambda: Stream(late=True))
    monkeypatch.setattr("sgl_batch.model_executor.gpu_experts.expert_layers", expert_layers)
    gpu.stream(model, [str(checkpoint.file)], MemoryConfig(weights="streamed"), expert_shard=0)
    gpu.adopt(model)
    assert gpu.streams_weights
    assert gpu.streamed_bytes == 2 * 4 * 3 * HIDDEN * INTER * 4, "two layers by default"
    host = read_experts(find_experts([str(checkpoint.file)], MODULES, range(4)), 1)
    for number, layer in enumerate(expert_layers(model)):
        x, ids = torch.randn(6, HIDDEN), torch.stack([torch.randperm(4)[:2] for _ in range(6)])
        weights = torch.rand(6, 2)
        given = SimpleNamespace(hidden_states=x, topk_output=(weights, ids, None))
        expected = combined_experts(x, host.w13[number], host.w2[number], weights, ids)[0]
        assert torch.equal(layer.quant_method.apply(layer, given).hidden_states, expected)
        assert torch.equal(gpu.call_experts(layer, x, weights, ids, f32_output=True), expected)
