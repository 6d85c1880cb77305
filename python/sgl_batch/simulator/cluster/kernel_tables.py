"""Reads tables of measured kernels from an installed aiconfigurator-core (Apache-2.0); nothing of it is kept here.

Its entries are seconds of single kernels on some GPUs, among which there is no H20 and no A5000. An entry that is
faster than the data sheet allows measures something else than its name says (experts that are not all reached). So does
a table that is slow throughout (latent attention of prompts in the form for decode). Both are refused.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sgl_batch.planner.roofline import Knots

PACKAGE = "aiconfigurator_core"
_MILLISECOND = 1e-3
_SYSTEMS = {"H200": "h200_sxm", "H100-SXM": "h100_sxm", "B200": "b200_sxm", "A100-80G": "a100_sxm", "L40S": "l40s"}
Row = Mapping[str, Any]
Sizes = tuple[float, ...]
# Of a table: the share of its entries that no data sheet forbids, and the share of the least time that kernels reach.
_BELIEVED, _FAIR = 0.75, 0.25


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by one size, between sizes on logarithmic axes; beyond the largest in proportion."""

    knots: Knots

    def at(self, size: float) -> float | None:
        """Return the seconds; None for sizes far below the smallest."""
        points = self.knots.points
        if size < points[0][0] / 2:
            return None
        return self.knots.at(size) * max(1.0, size / points[-1][0])


@dataclass(frozen=True, slots=True)
class Surface:
    """Seconds by length and number of sequences: a curve by number at each length."""

    lengths: tuple[float, ...]
    curves: tuple[Curve, ...]

    def at(self, length: float, count: float) -> float | None:
        """Return the seconds, beyond the longest length in proportion; None far outside of what was measured."""
        behind = min(max(bisect_left(self.lengths, length), 1), len(self.lengths) - 1)
        before, after = self.curves[behind - 1].at(count), self.curves[behind].at(count)
        if before is None or after is None or length < self.lengths[0] / 2:
            return None
        low, high = self.lengths[behind - 1], self.lengths[behind]
        share = min(max(math.log(length / low) / math.log(high / low), 0.0), 1.0)
        seconds = math.exp((1 - share) * math.log(before) + share * math.log(after))
        return seconds * max(1.0, length / self.lengths[-1])


def curve_of(points: Iterable[tuple[float, float]]) -> Curve | None:
    """Return the curve through (size, seconds), the least seconds of each size; None for fewer than two sizes."""
    least: dict[float, float] = {}
    for size, seconds in points:
        least[size] = min(seconds, least.get(size, math.inf))
    return Curve(Knots(tuple(sorted(least.items())))) if len(least) > 1 else None


def surface_of(points: Iterable[tuple[float, float, float]]) -> Surface | None:
    """Return the surface through (length, count, seconds); None for fewer than two lengths."""
    by_length: defaultdict[float, list[tuple[float, float]]] = defaultdict(list)
    for length, count, seconds in points:
        by_length[length].append((count, seconds))
    curves = [(length, curve) for length, found in sorted(by_length.items()) if (curve := curve_of(found))]
    if len(curves) < 2:
        return None
    return Surface(tuple(length for length, _ in curves), tuple(curve for _, curve in curves))


@dataclass(slots=True)
class KernelTables:
    """The tables of one GPU.

    Attributes:
        folder: Of the GPU's data.
        frameworks: Whose kernels count, the first one first.
        name: Of the package and the GPU, for reports.
        taken, refused: Entries so far that were believed, and that were not.
    """

    folder: Path
    frameworks: Sequence[str]
    name: str
    taken: int = 0
    refused: int = 0

    def points(
        self,
        operation: str,
        tables: Sequence[str],
        where: Mapping[str, Any],
        least_s: Callable[[Row], float],
        sizes: Callable[[Row], Sizes],
    ) -> list[tuple[Sizes, float]]:
        """Return sizes and seconds of the entries whose columns have these values; empty where there are none.

        They are of the first framework that is believed, and of its newest such version. A version is believed where
        few of its entries are faster than `least_s`, which a data sheet allows, and where its kernels reach a fair
        share of that; those that are faster are left out. `operation`: the folder, such as "moe".
        """
        for framework in self.frameworks:
            folders = sorted((self.folder / operation / framework).glob("*/"), key=_version, reverse=True)
            for folder in folders:
                paths = [path for table in tables if (path := folder / f"{table}.parquet").is_file()]
                rows = [row for path in paths for row in _read(path, where)]
                timed = [(sizes(row), row["latency"] * _MILLISECOND, least_s(row)) for row in rows]
                kept = [(size, seconds, least) for size, seconds, least in timed if seconds >= least]
                believed = len(kept) >= _BELIEVED * len(timed) and _is_fair(kept)
                self.taken += len(kept) if believed else 0
                self.refused += len(timed) - (len(kept) if believed else 0)
                if believed:
                    return [(size, seconds) for size, seconds, _ in kept]
        return []


def _is_fair(kept: Sequence[tuple[Sizes, float, float]]) -> bool:
    """Return whether kernels reach a fair share of the least time at best, and with the most work."""
    if not kept:
        return False
    best = max(least / seconds for _, seconds, least in kept)
    _, last_s, last_least = max(kept, key=lambda one: one[2])
    return best >= _FAIR and last_least / last_s >= _FAIR


def tables_of(gpu: str, frameworks: Sequence[str], root: Path | None = None) -> KernelTables | None:
    """Return the tables of a GPU by the name of its data sheet; None where they are not installed, or there are none.

    `root`: the package's folder, by default where it is installed; it is not imported.
    """
    folder = root or _installed()
    system = _SYSTEMS.get(gpu)
    if folder is None or system is None or find_spec("pyarrow") is None:
        return None
    data = folder / "systems" / "data" / system
    return KernelTables(data, frameworks, f"kernels measured on {gpu} ({PACKAGE})") if data.is_dir() else None


def _installed() -> Path | None:
    found = find_spec(PACKAGE)
    return Path(found.origin).parent if found is not None and found.origin else None


def _version(folder: Path) -> tuple[int, ...]:
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in folder.name.split("."))


def _read(path: Path, where: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows whose columns have these values; a column that an older table lacks is not asked for."""
    # Of an extra: without tables there is nothing to read.
    import pyarrow.parquet

    known = pyarrow.parquet.read_schema(path).names
    asked = [(name, "=", value) for name, value in where.items() if name in known]
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path, filters=asked).to_pylist()
    return rows
