"""Owns the rates of GPUs in data sheets: memory bandwidth, dense products, and PCIe.

Dense rates are without sparsity, half of the number that a sheet gives with it. PCIe is one direction, half of the
bidirectional number: 16 lanes of Gen4 are 32 GB/s, of Gen5 64.
"""

from __future__ import annotations

from dataclasses import dataclass

_PCIE4, _PCIE5 = 32e9, 64e9


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


def _sheet(name: str, memory: float, bf16: float, fp8: float | None, pcie: float) -> Rates:
    return Rates(
        source=f"data sheet of {name}",
        memory_bytes_per_s=memory,
        flop_per_s=bf16,
        copy_in_bytes_per_s=pcie,
        copy_out_bytes_per_s=pcie,
        fp8_flop_per_s=fp8,
    )


# Words that must all be in the name that nvidia-smi gives; the first entry that fits counts.
_SHEETS: tuple[tuple[tuple[str, ...], Rates], ...] = (
    # NVIDIA B200, DGX B200 data sheet: 64 TB/s of eight; FP8 72 and BF16 36 PFLOPS of eight with sparsity; PCIe Gen5.
    (("B200",), _sheet("B200", 8.0e12, 2250e12, 4500e12, _PCIE5)),
    # NVIDIA H200 data sheet, H200 NVL: 4.8 TB/s; BF16 1,671 and FP8 3,341 TFLOPS with sparsity; PCIe Gen5.
    (("H200", "NVL"), _sheet("H200 NVL", 4.8e12, 835.5e12, 1670.5e12, _PCIE5)),
    # NVIDIA H200 data sheet, H200 SXM: 4.8 TB/s; BF16 1,979 and FP8 3,958 TFLOPS with sparsity; PCIe Gen5 128 GB/s.
    (("H200",), _sheet("H200 SXM", 4.8e12, 989.5e12, 1979e12, _PCIE5)),
    # NVIDIA H100 data sheet, H100 NVL: 3.9 TB/s; BF16 1,671 and FP8 3,341 TFLOPS with sparsity; PCIe Gen5.
    (("H100", "NVL"), _sheet("H100 NVL", 3.9e12, 835.5e12, 1670.5e12, _PCIE5)),
    # NVIDIA H100 data sheet, first edition, H100 PCIe: 2 TB/s; BF16 1,513 and FP8 3,026 TFLOPS with sparsity.
    (("H100", "PCIe"), _sheet("H100 PCIe", 2.0e12, 756.5e12, 1513e12, _PCIE5)),
    # NVIDIA H100 data sheet, H100 SXM: 3.35 TB/s; BF16 1,979 and FP8 3,958 TFLOPS with sparsity; PCIe Gen5 128 GB/s.
    (("H100",), _sheet("H100 SXM", 3.35e12, 989.5e12, 1979e12, _PCIE5)),
    # NVIDIA A100 data sheet, 40 GB: 1,555 GB/s; BF16 312 TFLOPS, dense; no FP8; PCIe Gen4 64 GB/s.
    (("A100", "40GB"), _sheet("A100 40GB", 1.555e12, 312e12, None, _PCIE4)),
    # NVIDIA A100 data sheet, 80 GB PCIe: 1,935 GB/s; the rest as above.
    (("A100", "PCIe"), _sheet("A100 80GB PCIe", 1.935e12, 312e12, None, _PCIE4)),
    # NVIDIA A100 data sheet, 80 GB SXM: 2,039 GB/s; the rest as above.
    (("A100",), _sheet("A100 80GB SXM", 2.039e12, 312e12, None, _PCIE4)),
    # NVIDIA L40S data sheet: 864 GB/s; BF16 362.05 and FP8 733 TFLOPS, dense; PCIe Gen4 64 GB/s.
    (("L40S",), _sheet("L40S", 864e9, 362.05e12, 733e12, _PCIE4)),
    # NVIDIA L4 data sheet: 300 GB/s; BF16 242 and FP8 485 TFLOPS with sparsity; PCIe Gen4 64 GB/s.
    (("L4",), _sheet("L4", 300e9, 121e12, 242.5e12, _PCIE4)),
)


def sheet_of(gpu: str) -> Rates | None:
    """Return the data sheet of a GPU by its name in nvidia-smi, or None if there is none here."""
    words = gpu.replace(",", " ").replace("-", " ").upper().split()
    for wanted, rates in _SHEETS:
        if all(word.upper() in words for word in wanted):
            return rates
    return None
