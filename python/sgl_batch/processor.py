"""Reads which processor a machine has, and its instruction sets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """The first processor. `name`: its model, None where unknown. `flags`: as the kernel names them ("avx2", ...)."""

    name: str | None
    flags: frozenset[str]


def read_processor(root: Path = Path("/")) -> Processor:
    """Return the machine's processor; one of no name and no flags where that cannot be read. `root`: of its /proc."""
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    first, _, _ = text.partition("\n\n")
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    return Processor(name=fields.get("model name"), flags=frozenset(fields.get("flags", "").split()))
