"""Owns the rates of one rank: what hardware has, times the shares that an engine reaches; matrices at these rates."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_batch.planner.layouts import Layout
from sgl_batch.simulator.cluster.engine_settings import EngineSettings
from sgl_batch.simulator.cluster.hardware import Cluster

_FP8_BYTES = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes and operations a second that one rank reaches.

    Attributes:
        memory: Of device memory.
        link: From or to host memory, each direction, while all GPUs of the node copy.
        bf16, fp8: Products; of FP8 those of bfloat16 where a GPU has none.
        experts: What grouped matrices of experts reach of `bf16` and `fp8`.
        attention: Products of attention.
        host_memory, host_flop: Of the rank's share of its host, for attention there.
        nvlink, network: Between GPUs of a node, and for each GPU between nodes.
        nodes, local: Nodes of an instance, and its ranks in one of them.
        corner: How far reading and products overlap (EngineSettings.corner).
    """

    memory: float
    link: float
    bf16: float
    fp8: float
    experts: float
    attention: float
    host_memory: float
    host_flop: float
    nvlink: float
    network: float
    nodes: int
    local: int
    corner: float

    def together(self, memory_s: float, compute_s: float) -> float:
        """Return the seconds of reading and of products of one module, at least the longer of both."""
        longer, shorter = max(memory_s, compute_s), min(memory_s, compute_s)
        if shorter <= 0:
            return longer
        return longer * float((1.0 + (shorter / longer) ** self.corner) ** (1.0 / self.corner))

    def products(self, number_bytes: float) -> float:
        """Return the products of weights with so many bytes a number. Below FP8 they are unpacked to bfloat16."""
        return self.fp8 if number_bytes == _FP8_BYTES else self.bf16

    def matrix_s(self, num_bytes: float, number_bytes: float, rows: float) -> tuple[float, float]:
        """Return the seconds of reading matrices of so many bytes, and of their products with so many rows."""
        if rows <= 0 or num_bytes <= 0:
            return 0.0, 0.0
        flop = 2.0 * num_bytes / number_bytes * rows
        return num_bytes / self.memory, flop / self.products(number_bytes)


def rates_of(cluster: Cluster, engine: EngineSettings, layout: Layout) -> Rates:
    """Return the rates of a rank."""
    sheet = cluster.sheet
    plain = cluster.reach.best * engine.products_share.best
    grouped = engine.expert_share.best / engine.products_share.best
    local = min(layout.ranks, cluster.node_gpus)
    link = cluster.link_bytes_per_s * engine.copy_share.best
    has_nvlink = sheet.nvlink_bytes_per_s is not None and local <= sheet.nvlink_gpus
    between = sheet.nvlink_bytes_per_s if has_nvlink else cluster.link_bytes_per_s
    assert between is not None, "without NVLink bytes go over PCIe"
    return Rates(
        memory=sheet.memory_bytes_per_s * engine.memory_share.best,
        link=link,
        bf16=sheet.bf16_flop_per_s * plain,
        fp8=(sheet.fp8_flop_per_s or sheet.bf16_flop_per_s) * plain,
        experts=grouped,
        attention=sheet.bf16_flop_per_s * cluster.attention_reach.best * engine.attention_share.best,
        host_memory=cluster.host_memory_bytes_per_s.best * engine.host_share.best / cluster.node_gpus,
        host_flop=cluster.cpu_flop_per_s.best * engine.host_share.best / cluster.node_gpus,
        nvlink=between * engine.exchange_share.best,
        network=cluster.network_bytes_per_s.best * engine.exchange_share.best,
        nodes=-(-layout.ranks // cluster.node_gpus),
        local=local,
        corner=engine.corner.best,
    )
