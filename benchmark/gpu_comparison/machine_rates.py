"""Owns the measured rates of a machine, and their comparison with its data sheet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comparison.child import measured_by_child

from gpu_comparison.data_sheets import Rates, sheet_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The rates of this machine: measured in this run, and from its data sheet; None if unknown.

    `fault`: why nothing was measured. `raw`: medians with smallest and largest.
    """

    measured: Rates | None = None
    sheet: Rates | None = None
    fault: str | None = None
    raw: Mapping[str, Mapping[str, float]] | None = None


def measured_rates(raw: Mapping[str, Mapping[str, float]]) -> Rates:
    """Return the medians of the rates that runners/device_rates.py measured."""
    values: dict[str, Any] = {name: value["median"] for name, value in raw.items()}
    return Rates(source="measured in this run", **values)


def measure_machine(
    out: Path, gpus: list[str], *, on_gpu: bool, limit_s: float, environment: Mapping[str, str]
) -> Machine:
    """Measure in a separate process, which takes some seconds and its start."""
    sheet = sheet_of(gpus[0]) if on_gpu and gpus else None
    sizes = {"num_bytes": 1 << 30, "width": 8192} if on_gpu else {"num_bytes": 1 << 26, "width": 1024}
    spec = {"device": "cuda" if on_gpu else "cpu", "rounds": 5, **sizes}
    raw, fault = measured_by_child(
        "device-rates",
        spec,
        out,
        runner="device_rates.py",
        limit_s=limit_s,
        threads=None,
        environment=environment,
    )
    if fault is not None:
        return Machine(sheet=sheet, fault=fault)
    return Machine(measured=measured_rates(raw), sheet=sheet, raw=raw)


def describe(machine: Machine) -> str:
    """Return both rates in one line each, for the report."""
    lines = [f"- rates, {rates.source}: {_in_words(rates)}" for rates in (machine.measured, machine.sheet) if rates]
    if machine.fault is not None:
        lines.append(f"- rates could not be measured: {machine.fault}")
    if machine.sheet is None:
        lines.append("- no data sheet of this device is known here")
    return "\n".join(lines)


def _in_words(rates: Rates) -> str:
    said = [
        f"device memory {rates.memory_bytes_per_s / 1e9:,.0f} GB/s",
        f"bfloat16 products {rates.flop_per_s / 1e12:,.2f} TFLOP/s",
    ]
    for name, rate in (("from", rates.copy_in_bytes_per_s), ("to", rates.copy_out_bytes_per_s)):
        if rate is not None:
            said.append(f"copies {name} the host {rate / 1e9:,.1f} GB/s")
    if rates.fp8_flop_per_s is not None:
        said.append(f"fp8 products {rates.fp8_flop_per_s / 1e12:,.0f} TFLOP/s")
    return ", ".join(said)
