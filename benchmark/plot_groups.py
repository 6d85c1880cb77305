#!/usr/bin/env python
"""Owns the drawing of throughput against the group's size, from the record that `benchmark/memory.py weights` wrote.

Needs matplotlib: pip install '.[plot]'.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

_LABELS = {
    "sgl_batch": "streamed weights",
    "mapped": "the same engine, weights in a mapped file",
    "accelerate": "transformers, accelerate's disk offload",
}


def rates(record: dict[str, Any]) -> dict[str, dict[int, list[float]]]:
    """Return tokens per second by engine and group, for each round."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in record["runs"]:
        for group in run["groups"]:
            found[run["engine"]][group["size"]].append(group["size"] * record["output_len"] / group["wall_s"])
    return found


def draw(record: dict[str, Any], target: Path) -> None:
    """Draw medians as lines and the range of the rounds as bands, with logarithmic axes."""
    figure, panel = plt.subplots(figsize=(6.5, 4), layout="constrained")
    for engine, by_size in rates(record).items():
        sizes = sorted(by_size)
        panel.fill_between(sizes, [min(by_size[n]) for n in sizes], [max(by_size[n]) for n in sizes], alpha=0.2, lw=0)
        panel.plot(sizes, [statistics.median(by_size[n]) for n in sizes], "o-", ms=4, label=_LABELS.get(engine, engine))
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.xaxis.set_major_formatter(mpl.ticker.StrMethodFormatter("{x:.0f}"))
    panel.set_xlabel("sequences of a group")
    panel.set_ylabel("output tokens/s")
    panel.set_title(f"a model of 1.5 times its {record['limit_bytes'] / 2**30:.0f} GiB of memory")
    panel.grid(alpha=0.3, which="both")
    panel.legend(fontsize="small")
    figure.savefig(target, dpi=110)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, help="record.json of `memory.py weights`")
    parser.add_argument("target", type=Path, help="the PNG to write")
    options = parser.parse_args(argv)
    draw(json.loads(options.record.read_text(encoding="utf-8")), options.target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
