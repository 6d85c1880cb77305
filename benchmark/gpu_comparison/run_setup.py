"""Owns the settings of all cases of a call: the device, its attention backend, and the switches of our engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpu_comparison.cases import Case, Role
from gpu_comparison.sizes import GIB

OURS, STOCK = "sgl_batch", "stock"
DEFAULT_STOCK = "stock, its defaults"
NO_GPU = "not available on a CPU"
_TINY_POOL = 16384  # tokens: on a CPU stock would fill half of the memory with zeros
_GRAPH_BYTES = 4 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetup:
    """Where a regime runs. `backend`: of attention, the same in both engines on a GPU; on a CPU each has its own."""

    on_gpu: bool
    tiny: bool
    backend: str
    gpu_bytes: int
    extra: dict[str, dict[str, Any]]

    @property
    def full_gpu(self) -> bool:
        """Whether weights and KV have a size that fills a GPU."""
        return self.on_gpu and not self.tiny

    def arguments(self, engine: str, more: dict[str, Any]) -> dict[str, Any]:
        """Return a constructor's arguments: those of all cases, then the case's own, then the user's."""
        device = {"device": "cuda", "attention_backend": self.backend} if self.on_gpu else {"device": "cpu"}
        page = {"page_size": 16, "boundary_tokens": 16} if self.tiny and engine == OURS else {}
        # Only stock's log has the retractions.
        log = {"log_level": "info" if engine == STOCK else "warning"}
        # Stock samples by the engine's seed, not by each request's.
        model: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "random_seed": 0}
        if self.tiny:
            model["max_total_tokens"] = _TINY_POOL
        return {**model, **device, **page, **log, **more, **self.extra[engine]}

    def ours(self, name: str, *, role: Role = Role.OURS, gpu_only: bool = False, **more: Any) -> Case:
        return Case(
            name=f"sgl_batch, {name}",
            role=role,
            engine=OURS,
            arguments=self.arguments(OURS, more),
            lacking=NO_GPU if gpu_only and not self.on_gpu else None,
        )

    def switched(self, name: str, **more: Any) -> tuple[Case, ...]:
        """Return ours with overlap and CUDA graphs, with one of them, and with neither; the first that runs counts."""
        on, off = self.graphs(on=True), self.graphs(on=False)
        return (
            self.ours(f"{name}, overlap and graphs", gpu_only=True, **more, **on, overlap="on"),
            self.ours(f"{name}, overlap", **more, **off, overlap="on"),
            self.ours(f"{name}, graphs", gpu_only=True, **more, **on, overlap="off"),
            self.ours(f"{name}, neither", **more, **off, overlap="off"),
        )

    def graphs(self, *, on: bool) -> dict[str, Any]:
        """Return our arguments with or without CUDA graphs. They fix the forward pass: no self-check changes it."""
        how = {"decode_graph_memory": _GRAPH_BYTES} if on else {"disable_cuda_graph": True}
        return {"decode_forward": "default", **how}

    def stock(self, name: str, *, role: Role = Role.PEER, gpu_only: bool = False, **more: Any) -> Case:
        return Case(
            name=name if name.startswith(STOCK) else f"stock, {name}",
            role=role,
            engine=STOCK,
            arguments=self.arguments(STOCK, more),
            lacking=NO_GPU if gpu_only and not self.on_gpu else None,
        )

    def routing(self, *, load_format: str) -> Case:
        """Return the engine that reports the chosen experts: stock on a GPU, which it needs, and ours otherwise."""
        more: dict[str, Any] = {"load_format": load_format, "enable_return_routed_experts": True}
        engine = STOCK if self.on_gpu else OURS
        arguments = self.arguments(engine, more)
        if self.on_gpu:
            arguments["disable_cuda_graph"] = True  # it prefills
        return Case(name="routing", role=Role.REFERENCE, engine=engine, arguments=arguments)
