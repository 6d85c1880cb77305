"""Owns the rates of a machine by which figures are bounded: measured, or those of the planner's data sheets."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_batch.planner.data_sheets import sheet_of_gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The most that a machine does in a second. `source`: a data sheet or a measurement.

    `memory_bytes_per_s`: read or written in device memory. `flop_per_s`: dense products in bfloat16. `copy_in_`,
    `copy_out_`: bytes from and to host memory; None where both memories are the same. `fp8_flop_per_s`: None where the
    device has no such products or they were not measured.
    """

    source: str
    memory_bytes_per_s: float
    flop_per_s: float
    copy_in_bytes_per_s: float | None = None
    copy_out_bytes_per_s: float | None = None
    fp8_flop_per_s: float | None = None


def sheet_of(gpu: str) -> Rates | None:
    """Return the rates in the data sheet of a GPU by its name in nvidia-smi, or None if there is none here."""
    sheet = sheet_of_gpu(gpu)
    if sheet is None:
        return None
    return Rates(
        source=f"data sheet of {sheet.title}",
        memory_bytes_per_s=sheet.memory_bytes_per_s,
        flop_per_s=sheet.bf16_flop_per_s,
        copy_in_bytes_per_s=sheet.pcie_bytes_per_s,
        copy_out_bytes_per_s=sheet.pcie_bytes_per_s,
        fp8_flop_per_s=sheet.fp8_flop_per_s,
    )
