"""Owns the public figures of GPUs: memory, bandwidths and products, each from its maker's data sheet. Nothing measured.

They stand in hardware/gpus.json, in the units of the documents, with what each document says. Products are dense: half
of the number that a sheet gives with sparsity. PCIe and NVLink are one direction, half of a sheet's bidirectional
number: 16 lanes of PCIe Gen4 are 32 GB/s, of Gen5 64. A sheet's GB of memory is counted as 10^9 bytes, which leaves
some percent of it to the driver.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from sgl_batch.errors import ConfigError

HERE = "here"
_GIGA, _TERA = 1e9, 1e12


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
        driver_memory_bytes: Device memory as the driver reports it, before any program; 0 where it is not known.
        driver_memory_source: Where that was read.
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
    driver_memory_bytes: int = 0
    driver_memory_source: str = ""

    @property
    def usable_bytes(self) -> float:
        """Return the memory that programs find: what the driver reports, or else the sheet's."""
        return self.driver_memory_bytes or self.memory_bytes


def _read() -> tuple[DataSheet, ...]:
    table = files("sgl_batch.planner") / "hardware" / "gpus.json"
    return tuple(_sheet(row) for row in json.loads(table.read_text("utf-8")))


def _sheet(row: Mapping[str, Any]) -> DataSheet:
    """Return a row of the table, whose rates are in GB/s and TFLOPS as documents give them, in plain units."""
    fp8, nvlink = row["fp8_tflops"], row.get("nvlink_gb_per_s")
    return DataSheet(
        name=row["name"],
        title=row["title"],
        words=tuple(row["words"]),
        source=row["source"],
        memory_bytes=row["memory_gb"] * _GIGA,
        memory_bytes_per_s=row["memory_gb_per_s"] * _GIGA,
        bf16_flop_per_s=row["bf16_tflops"] * _TERA,
        fp8_flop_per_s=None if fp8 is None else fp8 * _TERA,
        pcie_bytes_per_s=row["pcie_gb_per_s"] * _GIGA,
        nvlink_bytes_per_s=None if nvlink is None else nvlink * _GIGA,
        nvlink_gpus=row.get("nvlink_gpus", 1),
        driver_memory_bytes=row.get("driver_memory_mib", 0) << 20,
        driver_memory_source=row.get("driver_memory_source", ""),
    )


DATA_SHEETS: tuple[DataSheet, ...] = _read()


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
