"""Makes a cost model of a GPU that was not measured, from its data sheet and from assumptions that are named as such.

Each module is a roofline of its bytes and operations: the longer of the two times at the assumed shares of the sheet's
rates, and a launch. No number of it is measured, and nothing of it has been compared with a run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from sgl_batch.errors import ConfigError
from sgl_batch.planner.cost_model import AttentionCost, CostModel, ExchangeCost, StepCost
from sgl_batch.planner.data_sheets import DataSheet
from sgl_batch.planner.layouts import Layout, exchange_row_bytes
from sgl_batch.planner.model_layers import DENSE, MOE, ModelLayers
from sgl_batch.planner.roofline import COMPUTE, MEMORY, Count, Knots, Roofline

DATA_SHEET, ASSUMED = "data sheet", "assumed"
_ROWS = tuple(float(1 << power) for power in range(18))
_FP8 = 1.0
_PRODUCTS_SHARE = Knots(((1.0, 0.1), (64.0, 0.4), (512.0, 0.65)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What no data sheet says. All of it is assumed; a profile of the GPU would replace it.

    Attributes:
        memory_share: Of the memory bandwidth, for weights and KV.
        products_share: Of the dense products, by the rows of one matrix: few rows do not fill a kernel's tiles.
        attention_share: Of the dense products, for attention in prefill and for latent attention in decode.
        copy_share: Of PCIe's bandwidth.
        exchange_share: Of the bandwidth between GPUs.
        launch_s: Seconds that launching a module takes beside its work: attention of a sub-batch, a router, experts.
        host_launch_s: Seconds in which the host launches a module kernel by kernel, as it does for several ranks, whose
            decode steps have no CUDA graphs (docs/ranks.md); they hide behind work that takes longer.
        exchange_s: Seconds that the calls of one exchange take, whatever their size.
        network_bytes_per_s: Of one GPU in one direction between machines: a link of 400 Gbit/s each.
        step_s, step_row_s: Seconds of a decode step beside its layers and logits, and of each of its sequences.
        agree_s: Seconds in which several ranks agree on a step.
        group_s, sequence_s: Seconds of the intake of a prefill group, and of each of its requests.
    """

    memory_share: float = 0.8
    products_share: Knots = _PRODUCTS_SHARE
    attention_share: float = 0.5
    copy_share: float = 0.8
    exchange_share: float = 0.6
    launch_s: float = 15e-6
    host_launch_s: float = 60e-6
    exchange_s: float = 60e-6
    network_bytes_per_s: float = 50e9
    step_s: float = 2e-3
    step_row_s: float = 5e-6
    agree_s: float = 3e-4
    group_s: float = 2e-3
    sequence_s: float = 3e-4

    def listed(self) -> dict[str, float | list[tuple[float, float]]]:
        """Return all of them by name, as plain data."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: list(value.points) if isinstance(value, Knots) else value for name, value in values.items()}


def sheet_costs(sheet: DataSheet, model: ModelLayers, layout: Layout, assumed: Assumptions) -> CostModel:
    """Return the costs of one rank of a layout on GPUs of a data sheet.

    `model`: as one rank has it (layouts.rank_layers). Raises ConfigError where its weights have a number type whose
    products the sheet does not name.
    """
    modules = _Modules(sheet, model, assumed)
    attention = modules.of_weights(model.attention_bytes)
    kv_s = model.kv_layer_bytes / (sheet.memory_bytes_per_s * assumed.memory_share)
    products = sheet.bf16_flop_per_s * assumed.attention_share
    looking_s, decoding_s = model.prefill_flop / products, model.decode_flop / products
    plain = modules.of_weights(model.router_bytes)
    return CostModel(
        decode_attention=AttentionCost(
            of_rows=attention,
            slope=Knots(((1.0, max(kv_s, decoding_s)),)),
            looking=MEMORY if kv_s >= decoding_s else COMPUTE,
        ),
        prefill_attention=AttentionCost(of_rows=attention, slope=Knots(((1.0, looking_s),)), looking=COMPUTE),
        router={MOE: plain, DENSE: _nothing()},
        experts={MOE: modules.of_experts(), DENSE: modules.of_weights(model.dense_bytes)},
        pass_s=0.0,
        step=StepCost(decode=modules.of_step(), sequence_s=assumed.sequence_s, group_s=assumed.group_s),
        rates=dict.fromkeys(("copy", "disk"), sheet.pcie_bytes_per_s * assumed.copy_share),
        exchange=_exchange(sheet, model, layout, assumed),
    )


class _Modules:
    """Makes rooflines of modules; bandwidth and peak are those of the sheet times the assumed shares."""

    def __init__(self, sheet: DataSheet, model: ModelLayers, assumed: Assumptions) -> None:
        self._sheet, self._model, self._assumed = sheet, model, assumed
        flop = sheet.bf16_flop_per_s
        if model.weight_bytes == _FP8:
            if sheet.fp8_flop_per_s is None:
                raise ConfigError(
                    f"the model's weights are in FP8, and the {sheet.title} has no such products; name other hardware, "
                    "or a model in bfloat16"
                )
            flop = sheet.fp8_flop_per_s
        # A product of a row with a weight of so many bytes is two operations.
        self._work_per_s = flop * model.weight_bytes / 2

    def of_weights(self, num_bytes: float) -> Roofline:
        """Return a module all of whose weights all rows go through."""
        size = max(num_bytes, 1.0)
        return self._roofline(lambda _: size, lambda rows: size * rows, lambda rows: rows)

    def of_experts(self) -> Roofline:
        """Return the experts of a layer: each row goes to some of them, each of which is a matrix of its own."""
        model = self._model
        each = model.top_k * model.ranks / max(model.experts, 1)
        return self._roofline(model.expert_bytes(MOE), model.expert_work(MOE), lambda rows: max(rows * each, 1.0))

    def of_step(self) -> Roofline:
        """Return what surrounds the layers of a decode step: logits, and the work of the host."""
        size, assumed = max(self._model.head_bytes, 1.0), self._assumed
        fixed_s = assumed.step_s + (assumed.agree_s if self._model.ranks > 1 else 0.0)
        return self._roofline(
            lambda _: size,
            lambda rows: size * rows,
            lambda rows: rows,
            beside=lambda rows: fixed_s + assumed.step_row_s * rows,
        )

    def _roofline(
        self, bytes_of: Count, work_of: Count, matrix_rows: Count, beside: Callable[[float], float] | None = None
    ) -> Roofline:
        assumed = self._assumed
        bandwidth = self._sheet.memory_bytes_per_s * assumed.memory_share
        peak = self._work_per_s * assumed.products_share.points[-1][1]
        launching_s = assumed.host_launch_s if self._model.ranks > 1 else 0.0
        points = []
        for rows in _ROWS:
            memory_s = bytes_of(rows) / bandwidth
            compute_s = work_of(rows) / (self._work_per_s * assumed.products_share.at(matrix_rows(rows)))
            seconds = max(memory_s, compute_s, launching_s) + assumed.launch_s + (beside(rows) if beside else 0.0)
            points.append((rows, (memory_s + work_of(rows) / peak) / seconds))
        return Roofline(
            bytes_of=bytes_of, work_of=work_of, bandwidth=bandwidth, peak=peak, efficiency=Knots(tuple(points))
        )


def _nothing() -> Roofline:
    """Return a module that takes no time: a dense layer has no router."""
    return Roofline(
        bytes_of=lambda _: 0.0,
        work_of=lambda _: 0.0,
        bandwidth=1.0,
        peak=1.0,
        efficiency=Knots(((1.0, 1.0),)),
        is_counted=False,
    )


def _exchange(sheet: DataSheet, model: ModelLayers, layout: Layout, assumed: Assumptions) -> ExchangeCost | None:
    """Return the exchange between the ranks of an instance: over NVLink as far as it reaches, else over PCIe."""
    if layout.ranks == 1:
        return None
    over, rate, source = "PCIe", sheet.pcie_bytes_per_s, DATA_SHEET
    if sheet.nvlink_bytes_per_s is not None and layout.ranks <= sheet.nvlink_gpus:
        over, rate = "NVLink", sheet.nvlink_bytes_per_s
    elif layout.machines > 1:
        over, rate, source = "the network between machines", assumed.network_bytes_per_s, ASSUMED
    share = assumed.exchange_share
    over = f"over {over} at {rate / 1e9:,.0f} GB/s each way ({source})"
    return ExchangeCost(
        row_bytes=exchange_row_bytes(model, layout),
        bytes_per_s=rate * share,
        fixed_s=assumed.exchange_s,
        kinds=frozenset((MOE, DENSE) if layout.tensor else (MOE,)),
        label=f"{over}, of which {share:.0%} are reached ({ASSUMED})",
    )
