"""Owns the tables of a model larger than memory: speed by group, ratio to the best other, share of the disk's bound."""

from __future__ import annotations

from collections.abc import Sequence

from comparison.figures import Spread, paired_ratios, spread
from comparison.report import table

from large_model.measure import Group, Run, Workload

OURS = "sgl_batch"


def tokens_per_s(group: Group, output_len: int) -> float:
    """Return output tokens per second, prefill included."""
    return group.size * output_len / group.wall_s


def bound_share(group: Group) -> float:
    """Return the share of the rate that the disk allows if each needed expert is read once per pass and group."""
    return group.needed_bytes / group.disk_bytes_per_s / group.wall_s


def speed_table(workload: Workload, runs: Sequence[Run], engines: Sequence[str]) -> str:
    """Return tokens per second by group size, and ours relative to the best of the others, paired by round."""
    others = [engine for engine in engines if engine != OURS]
    rows = []
    for size in workload.groups:
        speeds = {engine: _speeds(runs, engine, size, workload.output_len) for engine in engines}
        cells = [_text(spread(speeds[engine].values())) for engine in engines]
        best = max(others, key=lambda engine: max(speeds[engine].values(), default=0.0), default=None)
        ratio = paired_ratios(speeds[OURS], speeds[best]) if best is not None and OURS in speeds else None
        rows.append([str(size), *cells, "-" if ratio is None else f"{ratio.text(1)} ({best})"])
    return table(["group", *(f"{engine}, tokens/s" for engine in engines), "ratio to the best other"], rows)


def bound_table(workload: Workload, runs: Sequence[Run]) -> str:
    """Compare ours with the disk: bytes needed, bytes read, and the share of the bound."""
    rows = []
    for size in workload.groups:
        groups = [group for run in runs if run.engine == OURS for group in run.groups if group.size == size]
        if groups:
            rows.append(
                [
                    str(size),
                    _text(spread(group.needed_bytes / 1e9 for group in groups)),
                    _text(spread(group.read_bytes / 1e9 for group in groups)),
                    _text(spread(group.disk_bytes_per_s / 1e9 for group in groups), 2),
                    _text(spread(group.needed_bytes / group.disk_bytes_per_s for group in groups)),
                    _text(spread(group.wall_s for group in groups)),
                    _text(spread(100 * bound_share(group) for group in groups), 0),
                ]
            )
    headings = ["group", "needed, GB", "read, GB", "disk, GB/s", "bound, s", "took, s", "share of the bound, %"]
    return table(headings, rows)


def _speeds(runs: Sequence[Run], engine: str, size: int, output_len: int) -> dict[int, float]:
    return {
        group.round: tokens_per_s(group, output_len)
        for run in runs
        if run.engine == engine
        for group in run.groups
        if group.size == size
    }


def _text(value: Spread | None, digits: int = 1) -> str:
    return "-" if value is None else value.text(digits)


def memory_table(runs: Sequence[Run], engines: Sequence[str]) -> str:
    """Return each engine's peak memory, start time, and the reason of an early end."""
    rows = []
    for engine in engines:
        own = [run for run in runs if run.engine == engine]
        faults = sorted({run.fault for run in own if run.fault is not None})
        if own:
            peak = max(run.peak_bytes for run in own) / 2**30
            rows.append([engine, f"{peak:.2f}", _text(spread(run.start_s for run in own)), "; ".join(faults) or "-"])
    return table(["engine", "peak, GiB", "start, s", "ended early"], rows)
