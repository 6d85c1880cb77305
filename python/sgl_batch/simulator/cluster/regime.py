"""Owns regimes: where weights, KV and attention lie while an instance decodes, and in which form it prefills."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_batch.planner.candidate import DEVICE, INCLUSIVE, STREAMED

HOST = "host"
EXPERT_PARALLEL, DATA_PARALLEL = "expert parallel", "data parallel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """How an instance runs.

    Attributes:
        kv: "device", "inclusive" (a store in host memory has all KV, and what runs is on the device as well), or
            "streamed" (KV comes from the store in each layer of each step).
        streamed_weights: The share of a rank's routed experts that come from host memory in each pass.
        prefill: "expert parallel", where rows go to the ranks that have their experts, or "data parallel", where each
            rank computes its own rows with experts that come from host memory, and nothing is exchanged (BatchGen 5.6).
        attention: "device", or "host": in decode the host's processors compute it beside the device.
    """

    kv: str = DEVICE
    streamed_weights: float = 0.0
    prefill: str = EXPERT_PARALLEL
    attention: str = DEVICE

    @property
    def has_store(self) -> bool:
        """Return whether host memory holds KV."""
        return self.kv != DEVICE or self.attention == HOST

    @property
    def runs_from_store(self) -> bool:
        """Return whether the KV of what runs is in host memory alone, so that device pages do not limit it."""
        return self.kv == STREAMED or self.attention == HOST

    def text(self) -> str:
        """Return the regime in words."""
        weights = (
            f"{self.streamed_weights:.0%} of the experts streamed" if self.streamed_weights else "weights resident"
        )
        kv = {DEVICE: "KV on the device", INCLUSIVE: "KV in host memory", STREAMED: "KV streamed"}[self.kv]
        where = ", attention on the host" if self.attention == HOST else ""
        return f"{weights}, {kv}{where}, prefill {self.prefill}"
