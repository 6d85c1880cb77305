"""Owns which measured kernels answer for the modules of a model: experts, attention, and the matrices of attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from sgl_batch.core.model_numbers import Value, head_dims, number
from sgl_batch.planner.data_sheets import DataSheet
from sgl_batch.planner.model_layers import ModelLayers
from sgl_batch.simulator.cluster.engine_settings import ALL_TO_ALL, EngineSettings
from sgl_batch.simulator.cluster.kernel_tables import Curve, KernelTables, Row, Surface, curve_of, surface_of, tables_of
from sgl_batch.simulator.cluster.models import FP8_BYTES, ITEM_BYTES, MXFP4_BYTES, ClusterModel

_TYPES = {2.0: "bfloat16", FP8_BYTES: "fp8_block", MXFP4_BYTES: "w4a16_mxfp4"}
_EVEN = ("uniform", "balanced")


class MeasuredModules:
    """Seconds of a layer's modules on one rank, where tables have entries of their shapes; else None.

    Args:
        tables: Of the GPU.
        model: The model.
        config: Its configuration.
        sheet: The GPU's data sheet, whose rates no entry may surpass.
        ranks: That share the experts.
        exchange: The form of exchange: kernels for all-to-all have tables of their own.
    """

    def __init__(
        self,
        tables: KernelTables,
        model: ModelLayers,
        config: Mapping[str, Any],
        sheet: DataSheet,
        *,
        ranks: int,
        exchange: str,
    ) -> None:
        self.tables, self._model, self._value, self._sheet = tables, model, config.get, sheet
        self._ranks, self._exchange = ranks, exchange

    def experts_s(self, rows: float, *, alone: bool) -> float | None:
        """Return the seconds of a rank's experts with so many rows of all ranks, or of all experts with its own."""
        if self._of_ranks is not None and not alone:
            return self._of_ranks.at(rows)
        whole = self._whole.at(rows) if self._whole else None
        # Ranks share the experts, each of which has as many rows as if there were one rank.
        return whole if alone or whole is None else whole / self._ranks

    def prompts_s(self, tokens: float, pairs: float) -> float | None:
        """Return the seconds of attention of prompts of so many tokens, which are taken to be equally long."""
        if self._prompts is None or not tokens:
            return None
        length = max(2 * pairs / tokens - 1, 1.0)
        return self._prompts.at(length, tokens / length)

    def decode_s(self, rows: float, kv_tokens: float) -> float | None:
        """Return the seconds of attention of so many sequences, which are taken to be equally long."""
        if self._decode is None or not rows:
            return None
        return self._decode.at(max(kv_tokens / rows, 1.0), rows)

    def matrices_s(self, rows: float) -> float | None:
        """Return the seconds of the matrices of a layer's attention."""
        if self._matrices is None or not rows:
            return None
        found = [(curve.at(rows), scale) for curve, scale in self._matrices]
        return sum(scale * seconds for seconds, scale in found if seconds is not None)

    @cached_property
    def _of_ranks(self) -> Curve | None:
        """The curve of kernels that have their rows from an all-to-all, by the rows of all ranks."""
        if self._exchange != ALL_TO_ALL or self._ranks == 1:
            return None
        return self._experts(("wideep_generation_moe_perf", "wideep_context_moe_perf"), self._ranks)

    @cached_property
    def _whole(self) -> Curve | None:
        return self._experts(("moe_perf",), 1)

    def _experts(self, tables: Sequence[str], ranks: int) -> Curve | None:
        model = self._model
        dtype = _TYPES.get(model.expert_number_bytes)
        if not model.experts or dtype is None:
            return None
        hidden = model.hidden_bytes / ITEM_BYTES
        where = {
            "hidden_size": int(hidden),
            "inter_size": round(model.expert_bytes_each / model.expert_number_bytes / 3 / hidden),
            "topk": model.top_k,
            "num_experts": model.experts,
            "moe_tp_size": 1,
            "moe_ep_size": ranks,
            "moe_dtype": dtype,
        }
        for distribution in _EVEN:
            found = self.tables.points(
                "moe",
                tables,
                {**where, "distribution": distribution},
                lambda row: self._least_s(row, ranks),
                lambda row: (float(row["num_tokens"]),),
            )
            if curve := curve_of((size, seconds) for (size,), seconds in found):
                return curve
        return None

    def _least_s(self, row: Row, ranks: int) -> float:
        """Return the least seconds that a data sheet allows for the experts of one rank."""
        model, rows = self._model, row["num_tokens"]
        hit = 1 - (1 - model.top_k / model.experts) ** rows
        memory_s = model.experts / ranks * hit * model.expert_bytes_each / self._sheet.memory_bytes_per_s
        flop = 2 * rows * model.top_k / ranks * model.expert_bytes_each / model.expert_number_bytes
        return float(max(memory_s, flop / self._flop_per_s(model.expert_number_bytes)))

    def _flop_per_s(self, number_bytes: float) -> float:
        fp8 = self._sheet.fp8_flop_per_s
        return fp8 if number_bytes == FP8_BYTES and fp8 else self._sheet.bf16_flop_per_s

    @cached_property
    def _prompts(self) -> Surface | None:
        return self._attention(
            "context",
            self._model.prefill_flop,
            0.0,
            lambda row: (float(row["isl"]), float(row["batch_size"])),
            lambda length: length * (length + 1) / 2,
        )

    @cached_property
    def _decode(self) -> Surface | None:
        return self._attention(
            "generation",
            self._model.decode_flop,
            self._model.kv_layer_bytes,
            lambda row: (float(row["isl"] + row["step"]), float(row["batch_size"])),
            lambda length: length,
        )

    def _attention(
        self,
        phase: str,
        flop: float,
        kv_bytes: float,
        point: Callable[[Row], tuple[float, float]],
        looked_at: Callable[[float], float],
    ) -> Surface | None:
        """Return the surface of one phase of attention in bfloat16, without windows, by length and number."""
        latent = number(self._value, "kv_lora_rank")
        heads = number(self._value, "num_attention_heads")
        where: dict[str, Any] = {"num_heads": heads, "kv_cache_dtype": "bfloat16"}
        if latent:
            where |= {"mla_dtype": "bfloat16", "tp_size": 1}
        else:
            where |= {"attn_dtype": "bfloat16", "window_size": 0, "num_key_value_heads": self._model.kv_heads}
            where |= {"head_dim": head_dims(self._value)[0]}
        if self._model.window_layers:
            return None
        name = f"{phase}_{'mla' if latent else 'attention'}_perf"

        def least_s(row: Row) -> float:
            length, count = point(row)
            seen = count * looked_at(length)
            return max(seen * flop / self._sheet.bf16_flop_per_s, seen * kv_bytes / self._sheet.memory_bytes_per_s)

        found = self.tables.points("mla" if latent else "attention", (name,), where, least_s, point)
        return surface_of((length, count, seconds) for (length, count), seconds in found)

    @cached_property
    def _matrices(self) -> list[tuple[Curve, float]] | None:
        """The curves of matrices of the nearest shapes, and how many times as large ours are."""
        found = []
        for out, inner in _matrix_shapes(self._value):
            outputs, inputs = _nearest(out), _nearest(inner)
            curve = self._matrix(outputs, inputs)
            if curve is None:
                return None
            found.append((curve, out * inner / (outputs * inputs)))
        return found

    def _matrix(self, outputs: int, inputs: int) -> Curve | None:
        number_bytes, size = self._model.weight_bytes, outputs * inputs
        flop_per_s = self._flop_per_s(number_bytes)
        found = self.tables.points(
            "gemm",
            ("gemm_perf",),
            {"n": outputs, "k": inputs, "gemm_dtype": _TYPES[number_bytes]},
            # Small matrices stay in the cache from one measurement to the next: products alone bound them.
            lambda row: 2 * row["m"] * size / flop_per_s,
            lambda row: (float(row["m"]),),
        )
        return curve_of((rows, seconds) for (rows,), seconds in found)


# Widths of the matrices in the tables.
_SIZES = (256, 512, 768, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 10240, 12288, 16384, 51200)


def _nearest(size: int) -> int:
    """Return the nearest of the widths that are measured."""
    return min(_SIZES, key=lambda one: abs(math.log(one / size)))


def _matrix_shapes(value: Value) -> list[tuple[int, int]]:
    """Return (outputs, inputs) of the matrices of a layer's attention."""
    hidden, heads = number(value, "hidden_size"), number(value, "num_attention_heads")
    latent = number(value, "kv_lora_rank")
    if not latent:
        key_dim, _ = head_dims(value)
        kv_heads = number(value, "num_key_value_heads", default=heads)
        return [((heads + 2 * kv_heads) * key_dim, hidden), (hidden, heads * key_dim)]
    queries, rotated = number(value, "q_lora_rank"), number(value, "qk_rope_head_dim")
    plain, value_dim = number(value, "qk_nope_head_dim"), number(value, "v_head_dim")
    return [
        (queries + latent + rotated, hidden),
        (heads * (plain + rotated), queries),
        (heads * (plain + value_dim), latent),
        (hidden, heads * value_dim),
    ]


def measured_modules(
    model: ClusterModel, sheet: DataSheet, engine: EngineSettings, *, ranks: int
) -> MeasuredModules | None:
    """Return the measured modules of a model on a GPU; None where no tables of it are installed."""
    tables = tables_of(sheet.name, engine.kernel_tables)
    if tables is None:
        return None
    return MeasuredModules(tables, model.layers, model.config, sheet, ranks=ranks, exchange=engine.exchange)
