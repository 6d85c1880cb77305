"""Decides which cores of a machine each rank gets: whole physical cores, neighbours, on as few sockets as possible.

Linux numbers the second hardware threads of all cores after the first ones. So the first half of the numbers is the
first thread of every core, not half of the cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_SYSFS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Cpu:
    """A logical CPU; CPUs are shared out in sorted order. `core`: the lowest CPU number on its physical core."""

    socket: int
    node: int
    core: int
    number: int


def cpus_and_threads() -> dict[str, int]:
    """Return how many CPUs this process may use, and how many threads compute in it.

    Processes that share CPUs out import this module and compute nothing: torch is imported here, where it is asked.
    """
    import torch

    return {"cpus": len(os.sched_getaffinity(0)), "threads": torch.get_num_threads()}


def read_cpus(numbers: Iterable[int], sysfs: Path = _SYSFS) -> list[Cpu]:
    """Read where these CPUs lie. Where the system does not say it, all lie on one socket, each on a core of its own."""
    found = []
    for number in sorted(numbers):
        directory = sysfs / f"cpu{number}"
        nodes = sorted(int(path.name.removeprefix("node")) for path in directory.glob("node[0-9]*"))
        siblings = _text(directory / "topology" / "thread_siblings_list") or str(number)
        core = int(siblings.replace("-", ",").split(",")[0])
        socket = int(_text(directory / "topology" / "physical_package_id") or 0)
        found.append(Cpu(socket=socket, node=nodes[0] if nodes else 0, core=core, number=number))
    return found


def _text(path: Path) -> str:
    return path.read_text(encoding="ascii").strip() if path.is_file() else ""


def share_of(cpus: Iterable[Cpu], rank: int, world_size: int) -> list[int]:
    """Return the numbers of this rank's CPUs.

    Physical cores are shared out evenly in order; where there are fewer cores than ranks, CPUs are. With more ranks
    than CPUs, several ranks get the same one.
    """
    ordered = sorted(cpus)
    cores: dict[int, list[int]] = {}
    for cpu in ordered:
        cores.setdefault(cpu.core, []).append(cpu.number)
    units = list(cores.values()) if len(cores) >= world_size else [[cpu.number] for cpu in ordered]
    first, last = (len(units) * index // world_size for index in (rank, rank + 1))
    return sorted(number for unit in units[first : max(last, first + 1)] for number in unit)
