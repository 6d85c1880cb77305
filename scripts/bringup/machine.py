"""Owns what stages and engines know of the machine of a bring-up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine of a bring-up. `device`: cuda or cpu; `folder`: of logs and results.

    `benchmark_minutes`: for each regime.
    """

    device: str
    dtype: str
    folder: Path
    attention_backend: str = "triton"
    benchmark_minutes: float = 9.0

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"
