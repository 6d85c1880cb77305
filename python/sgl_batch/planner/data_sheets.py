"""Owns the public figures of GPUs: memory, bandwidths and products, each from its maker's data sheet. Nothing measured.

Products are dense, in operations a second: half of the number that a sheet gives with sparsity. PCIe and NVLink are one
direction, half of a sheet's bidirectional number: 16 lanes of PCIe Gen4 are 32 GB/s, of Gen5 64. A sheet's GB of memory
is counted as 10^9 bytes, which leaves some percent of it to the driver.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_batch.errors import ConfigError

HERE = "here"
_PCIE4, _PCIE5 = 32e9, 64e9
# GPUs that one NVSwitch board, or one bridge, joins.
_BOARD, _BRIDGE, _BRIDGE_OF_FOUR = 8, 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSheet:
    """A GPU as its data sheet describes it.

    Attributes:
        name: What `--hardware` takes.
        title: Its name in reports.
        words: Words that are all in the name that nvidia-smi gives; of several sheets the first that fits counts.
        source: The document.
        memory_bytes: Device memory.
        memory_bytes_per_s: Read or written in device memory.
        bf16_flop_per_s: Dense products in bfloat16 or float16.
        fp8_flop_per_s: Dense products in FP8; None where the GPU has none.
        pcie_bytes_per_s: From or to host memory.
        nvlink_bytes_per_s: From or to other GPUs; None without NVLink, where such bytes go over PCIe.
        nvlink_gpus: How many GPUs NVLink joins.
    """

    name: str
    title: str
    words: tuple[str, ...]
    source: str
    memory_bytes: float
    memory_bytes_per_s: float
    bf16_flop_per_s: float
    fp8_flop_per_s: float | None
    pcie_bytes_per_s: float
    nvlink_bytes_per_s: float | None = None
    nvlink_gpus: int = 1


DATA_SHEETS: tuple[DataSheet, ...] = (
    # 1,440 GB, 64 TB/s and 14.4 TB/s of NVLink of eight; FP8 72 and BF16 36 PFLOPS of eight with sparsity; PCIe Gen5.
    DataSheet(
        name="B200",
        title="B200",
        words=("B200",),
        source="NVIDIA DGX B200 data sheet",
        memory_bytes=180e9,
        memory_bytes_per_s=8.0e12,
        bf16_flop_per_s=2250e12,
        fp8_flop_per_s=4500e12,
        pcie_bytes_per_s=_PCIE5,
        nvlink_bytes_per_s=900e9,
        nvlink_gpus=_BOARD,
    ),
    # 141 GB; 4.8 TB/s; BF16 1,671 and FP8 3,341 TFLOPS with sparsity; bridge of 2 or 4 GPUs 900 GB/s; PCIe Gen5.
    DataSheet(
        name="H200-NVL",
        title="H200 NVL",
        words=("H200", "NVL"),
        source="NVIDIA H200 data sheet",
        memory_bytes=141e9,
        memory_bytes_per_s=4.8e12,
        bf16_flop_per_s=835.5e12,
        fp8_flop_per_s=1670.5e12,
        pcie_bytes_per_s=_PCIE5,
        nvlink_bytes_per_s=450e9,
        nvlink_gpus=_BRIDGE_OF_FOUR,
    ),
    # 141 GB; 4.8 TB/s; BF16 1,979 and FP8 3,958 TFLOPS with sparsity; NVLink 900 GB/s; PCIe Gen5 128 GB/s.
    DataSheet(
        name="H200",
        title="H200 SXM",
        words=("H200",),
        source="NVIDIA H200 data sheet",
        memory_bytes=141e9,
        memory_bytes_per_s=4.8e12,
        bf16_flop_per_s=989.5e12,
        fp8_flop_per_s=1979e12,
        pcie_bytes_per_s=_PCIE5,
        nvlink_bytes_per_s=450e9,
        nvlink_gpus=_BOARD,
    ),
    # 94 GB; 3.9 TB/s; BF16 1,671 and FP8 3,341 TFLOPS with sparsity; NVLink 600 GB/s; PCIe Gen5 128 GB/s.
    DataSheet(
        name="H100-NVL",
        title="H100 NVL",
        words=("H100", "NVL"),
        source="NVIDIA H100 data sheet",
        memory_bytes=94e9,
        memory_bytes_per_s=3.9e12,
        bf16_flop_per_s=835.5e12,
        fp8_flop_per_s=1670.5e12,
        pcie_bytes_per_s=_PCIE5,
        nvlink_bytes_per_s=300e9,
        nvlink_gpus=_BRIDGE,
    ),
    # 80 GB; 2 TB/s; BF16 1,513 and FP8 3,026 TFLOPS with sparsity; NVLink 600 GB/s; PCIe Gen5 128 GB/s.
    DataSheet(
        name="H100-PCIe",
        title="H100 PCIe",
        words=("H100", "PCIe"),
        source="NVIDIA H100 data sheet, first edition",
        memory_bytes=80e9,
        memory_bytes_per_s=2.0e12,
        bf16_flop_per_s=756.5e12,
        fp8_flop_per_s=1513e12,
        pcie_bytes_per_s=_PCIE5,
        nvlink_bytes_per_s=300e9,
        nvlink_gpus=_BRIDGE,
    ),
    # 80 GB; 3.35 TB/s; BF16 1,979 and FP8 3,958 TFLOPS with sparsity; NVLink 900 GB/s; PCIe Gen5 128 GB/s.
    DataSheet(
        name="H100-SXM",
        title="H100 SXM",
        words=("H100",),
        source="NVIDIA H100 data sheet",
        memory_bytes=80e9,
        memory_bytes_per_s=3.35e12,
        bf16_flop_per_s=989.5e12,
        fp8_flop_per_s=1979e12,
        pcie_bytes_per_s=_PCIE5,
        nvlink_bytes_per_s=450e9,
        nvlink_gpus=_BOARD,
    ),
    # 40 GB; 1,555 GB/s; BF16 312 TFLOPS, dense; no FP8; NVLink 600 GB/s; PCIe Gen4 64 GB/s.
    DataSheet(
        name="A100-40G",
        title="A100 40GB",
        words=("A100", "40GB"),
        source="NVIDIA A100 data sheet",
        memory_bytes=40e9,
        memory_bytes_per_s=1.555e12,
        bf16_flop_per_s=312e12,
        fp8_flop_per_s=None,
        pcie_bytes_per_s=_PCIE4,
        nvlink_bytes_per_s=300e9,
        nvlink_gpus=_BOARD,
    ),
    # 80 GB; 1,935 GB/s; a bridge of 2 GPUs 600 GB/s; the rest as above.
    DataSheet(
        name="A100-80G-PCIe",
        title="A100 80GB PCIe",
        words=("A100", "PCIe"),
        source="NVIDIA A100 data sheet",
        memory_bytes=80e9,
        memory_bytes_per_s=1.935e12,
        bf16_flop_per_s=312e12,
        fp8_flop_per_s=None,
        pcie_bytes_per_s=_PCIE4,
        nvlink_bytes_per_s=300e9,
        nvlink_gpus=_BRIDGE,
    ),
    # 80 GB SXM; 2,039 GB/s; NVLink 600 GB/s; the rest as above.
    DataSheet(
        name="A100-80G",
        title="A100 80GB SXM",
        words=("A100",),
        source="NVIDIA A100 data sheet",
        memory_bytes=80e9,
        memory_bytes_per_s=2.039e12,
        bf16_flop_per_s=312e12,
        fp8_flop_per_s=None,
        pcie_bytes_per_s=_PCIE4,
        nvlink_bytes_per_s=300e9,
        nvlink_gpus=_BOARD,
    ),
    # 48 GB; 864 GB/s; BF16 362.05 and FP8 733 TFLOPS, dense; no NVLink; PCIe Gen4 64 GB/s.
    DataSheet(
        name="L40S",
        title="L40S",
        words=("L40S",),
        source="NVIDIA L40S data sheet",
        memory_bytes=48e9,
        memory_bytes_per_s=864e9,
        bf16_flop_per_s=362.05e12,
        fp8_flop_per_s=733e12,
        pcie_bytes_per_s=_PCIE4,
    ),
    # 24 GB; 300 GB/s; BF16 242 and FP8 485 TFLOPS with sparsity; no NVLink; PCIe Gen4 64 GB/s.
    DataSheet(
        name="L4",
        title="L4",
        words=("L4",),
        source="NVIDIA L4 data sheet",
        memory_bytes=24e9,
        memory_bytes_per_s=300e9,
        bf16_flop_per_s=121e12,
        fp8_flop_per_s=242.5e12,
        pcie_bytes_per_s=_PCIE4,
    ),
    # 24 GB; 1,008 GB/s; dense with sums in float32: BF16 165.2 and FP8 330.3 TFLOPS; no NVLink; PCIe Gen4 x16.
    DataSheet(
        name="RTX-4090",
        title="GeForce RTX 4090",
        words=("RTX", "4090"),
        source="NVIDIA Ada GPU Architecture white paper",
        memory_bytes=24e9,
        memory_bytes_per_s=1.008e12,
        bf16_flop_per_s=165.2e12,
        fp8_flop_per_s=330.3e12,
        pcie_bytes_per_s=_PCIE4,
    ),
)


def sheet_named(name: str) -> DataSheet:
    """Return the data sheet that `--hardware` names, in any case. Raises ConfigError, which lists the names."""
    for sheet in DATA_SHEETS:
        if sheet.name.lower() == name.lower():
            return sheet
    known = ", ".join(sorted(sheet.name for sheet in DATA_SHEETS))
    raise ConfigError(
        f"--hardware is {name!r}, of which there is no data sheet here; it takes {HERE} or one of {known}"
    )


def sheet_of_gpu(gpu: str) -> DataSheet | None:
    """Return the data sheet of a GPU by its name in nvidia-smi, or None if there is none here."""
    words = gpu.replace(",", " ").replace("-", " ").upper().split()
    return next((sheet for sheet in DATA_SHEETS if all(word.upper() in words for word in sheet.words)), None)
