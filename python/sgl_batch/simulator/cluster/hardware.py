"""Owns clusters: GPUs of one kind in nodes, their hosts and what joins them. Figures are in hardware/hosts.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from sgl_batch.errors import ConfigError
from sgl_batch.planner.data_sheets import DATA_SHEETS, DataSheet
from sgl_batch.simulator.cluster.assumed import Assumed, assumed_of, read_assumed, variants

_GIGA, _TERA = 1e9, 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """GPUs in nodes.

    Attributes:
        name: As in `h20x16`: the GPU and how many.
        sheet: The GPU's figures.
        gpus, gpus_per_node: All GPUs, and those of a node.
        host_memory_bytes: Of a node.
        host_memory_bytes_per_s: Of a node, which its GPUs' copies share.
        cpu_flop_per_s: Of a node.
        gpus_per_uplink: GPUs that share one link to host memory of the sheet's rate.
        network_bytes_per_s: Between nodes, for each GPU and direction.
        reach, attention_reach: The shares of the sheet's products that a large plain product reaches, and long
            attention.
        says: What the host is.
    """

    name: str
    sheet: DataSheet
    gpus: int
    gpus_per_node: int
    host_memory_bytes: float
    host_memory_bytes_per_s: Assumed
    cpu_flop_per_s: Assumed
    gpus_per_uplink: Assumed
    network_bytes_per_s: Assumed
    reach: Assumed
    attention_reach: Assumed
    says: str

    @property
    def link_bytes_per_s(self) -> float:
        """Return the most that one GPU gets from host memory in one direction while all GPUs of its node copy."""
        uplink = self.sheet.pcie_bytes_per_s / min(self.gpus_per_uplink.best, self.gpus)
        return min(uplink, self.host_memory_bytes_per_s.best / self.node_gpus)

    @property
    def node_gpus(self) -> int:
        """Return the GPUs of a full node of this cluster."""
        return min(self.gpus_per_node, self.gpus)

    def assumed(self) -> dict[str, Assumed]:
        """Return what is assumed, by field."""
        return assumed_of(self)

    def variants(self) -> Iterator[tuple[str, str, Cluster]]:
        """Yield the cluster with one assumed number at one end each, with the number's name and the end."""
        yield from variants(self)


def cluster_named(name: str) -> Cluster:
    """Return the cluster of a name such as `h20x16`. Raises ConfigError for what is not here."""
    table = _table()
    found = re.fullmatch(r"(.+?)x([1-9][0-9]{0,4})", name.lower())
    known = {_plain(gpu): gpu for gpu in table["gpus"]}
    gpu = known.get(_plain(found.group(1))) if found else None
    if found is None or gpu is None:
        raise ConfigError(
            f"there is no cluster {name!r}; name a GPU and how many, as in h20x16; GPUs: {', '.join(sorted(known))}"
        )
    entry = table["gpus"][gpu]
    host = table["hosts"][entry["host"]]
    sheet = next(one for one in DATA_SHEETS if one.name == gpu)
    return Cluster(
        name=name.lower(),
        sheet=sheet,
        gpus=int(found.group(2)),
        gpus_per_node=int(host["gpus_per_node"]),
        host_memory_bytes=host["memory_gb"] * _GIGA,
        host_memory_bytes_per_s=_scaled(host["memory_gb_per_s"], _GIGA),
        cpu_flop_per_s=_scaled(host["cpu_tflops"], _TERA),
        gpus_per_uplink=_scaled(host["gpus_per_uplink"], 1),
        network_bytes_per_s=_scaled(host["network_gb_per_s"], _GIGA),
        reach=_scaled(entry["reach"], 1),
        attention_reach=_scaled(entry["attention_reach"], 1),
        says=host["says"],
    )


def _table() -> dict[str, Any]:
    text = (files("sgl_batch.simulator.cluster") / "hardware" / "hosts.json").read_text("utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def _plain(gpu: str) -> str:
    """Return a GPU's name as clusters have it: `h100` for H100-SXM, `a5000` for RTX-A5000, `a100` for A100-80G."""
    plain = gpu.lower().removeprefix("rtx-").removesuffix("-sxm").removesuffix("-80g")
    return plain.replace("-", "")


def _scaled(entry: Any, unit: float) -> Assumed:
    found = read_assumed(entry)
    return Assumed(found.best * unit, found.low * unit, found.high * unit, found.why)
