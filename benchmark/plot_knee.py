#!/usr/bin/env python
"""Owns the drawing of throughput against b_moe, from the record that `benchmark/knee.py --json` wrote.

Needs matplotlib: pip install '.[plot]'.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

_UNITS = {"decode": "sequences", "prefill": "tokens"}


def draw(figures: dict[str, Any], target: Path) -> None:
    """Draw one panel for each phase: medians as lines, the range of the rounds as bands."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for panel, phase in zip(panels, _UNITS, strict=True):
        b_attn = figures["b_attn"][phase]
        for accumulate, label, color in (
            (True, "one expert call for the group", "tab:blue"),
            (False, f"experts called per attention sub-batch of {b_attn}", "tab:orange"),
        ):
            points = [p for p in figures["points"] if p["phase"] == phase and p["accumulate"] is accumulate]
            sizes = [point["b_moe"] for point in points]
            rates = [point["tokens_per_s"] for point in points]
            panel.fill_between(sizes, [min(r) for r in rates], [max(r) for r in rates], color=color, alpha=0.2, lw=0)
            panel.plot(sizes, [statistics.median(r) for r in rates], "o-", ms=4, color=color, label=label)
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(mpl.ticker.StrMethodFormatter("{x:.0f}"))
        panel.set_ylim(bottom=0)
        panel.set_title(phase)
        panel.set_xlabel(f"b_moe: {_UNITS[phase]} of a group")
        panel.set_ylabel("tokens/s")
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    figure.savefig(target, dpi=110)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, help="what knee.py --json wrote")
    parser.add_argument("target", type=Path, help="the PNG to write")
    options = parser.parse_args(argv)
    draw(json.loads(options.record.read_text(encoding="utf-8")), options.target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
