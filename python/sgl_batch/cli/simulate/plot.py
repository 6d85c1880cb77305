"""Draws simulated runs one below the other on one axis of time: how busy ranks are, and where the time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sgl_batch.cli.plan.canvas import FONT_SIZE, Box, Drawing, Label, text_width, write_drawing
from sgl_batch.cli.plan.durations import in_words

_WIDTH, _LEFT, _RIGHT, _GAP = 1200, 20, 20, 16
_TITLE, _NAME, _HEIGHT, _PARTS, _AXIS = 34, 22, 70, 20, 24
_BUSY, _IDLE, _GREY, _OTHERS = "#8fa9bd", "#f1e3d8", "#666666", "#cccccc"
# Colours of parts, from the longest of all runs; those that have none are shown together.
_COLORS = ("#3f7fb5", "#e8702a", "#5aa469", "#b07cc6", "#c9a227", "#7f8c8d", "#d7667b")
_TICKS = 6


def write_plot(target: Path, runs: Sequence[Mapping[str, Any]], *, title: str) -> None:
    """Draw the runs of a message. Raises ConfigError where the file cannot be written."""
    write_drawing(target, drawing_of(runs, title=title), "--plot")


def drawing_of(runs: Sequence[Mapping[str, Any]], *, title: str) -> Drawing:
    """Return the drawing of the runs."""
    boxes: list[Box] = []
    labels = [Label(x=_LEFT, y=_TITLE / 2, text=title, size=FONT_SIZE + 3)]
    end_s = max((run["seconds"] for run in runs), default=1.0)
    per_s = (_WIDTH - _LEFT - _RIGHT) / max(end_s, 1e-9)
    y, colors = float(_TITLE), _colors(runs)
    for run in runs:
        y = _busy(run, y, per_s, boxes, labels)
        y = _by_part(run, y, per_s, boxes, colors) + _GAP
    y = _axis(y, end_s, per_s, boxes, labels)
    y = _legend(y, boxes, labels, colors)
    return Drawing(width=_WIDTH, height=y, boxes=boxes, labels=labels)


def _colors(runs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the colour of each part that has one."""
    totals: dict[str, float] = {}
    for run in runs:
        for name, seconds in run["parts_s"].items():
            totals[name] = totals.get(name, 0.0) + seconds
    longest = sorted(totals, key=lambda name: -totals[name])
    return dict(zip(longest, _COLORS, strict=False))


def _busy(run: Mapping[str, Any], top: float, per_s: float, boxes: list[Box], labels: list[Label]) -> float:
    """Add how busy a run is; returns where its parts come."""
    head = f"{run['title']}: {in_words(run['seconds'])}, {run['tokens_per_s']:,.0f} tokens/s, idle {run['idle']:.0%}"
    labels.append(Label(x=_LEFT, y=top + _NAME / 2, text=head))
    line, first = run["timeline"], top + _NAME
    boxes.append(Box(x=_LEFT, y=first, width=run["seconds"] * per_s, height=_HEIGHT, fill=_IDLE))
    width = line["bin_s"] * per_s
    for number, share in enumerate(line["busy"]):
        x, height = _LEFT + number * width, _HEIGHT * min(share, 1.0)
        cut = min(width, _LEFT + run["seconds"] * per_s - x)
        if height > 0 and cut > 0:
            boxes.append(Box(x=x, y=first + _HEIGHT - height, width=cut, height=height, fill=_BUSY))
    return first + _HEIGHT + 6


def _by_part(run: Mapping[str, Any], y: float, per_s: float, boxes: list[Box], colors: Mapping[str, str]) -> float:
    """Add a bar of the run's parts, each as long as it takes; returns where it ends."""
    parts = {name: run["parts_s"].get(name, 0.0) for name in colors}
    rest = sum(run["parts_s"].values()) - sum(parts.values())
    x = float(_LEFT)
    for seconds, fill in zip((*parts.values(), rest), (*colors.values(), _OTHERS), strict=True):
        boxes.append(Box(x=x, y=y, width=max(seconds, 0.0) * per_s, height=_PARTS, fill=fill))
        x += seconds * per_s
    return y + _PARTS


def _axis(y: float, end_s: float, per_s: float, boxes: list[Box], labels: list[Label]) -> float:
    boxes.append(Box(x=_LEFT, y=y, width=_WIDTH - _LEFT - _RIGHT, height=1, fill=_GREY))
    for number in range(_TICKS + 1):
        seconds = end_s * number / _TICKS
        x = _LEFT + seconds * per_s
        boxes.append(Box(x=x, y=y, width=1, height=5, fill=_GREY))
        anchor = "start" if number == 0 else "end" if number == _TICKS else "middle"
        labels.append(Label(x=x, y=y + _AXIS / 2 + 2, text=in_words(seconds), anchor=anchor, color=_GREY))
    return y + _AXIS


def _legend(y: float, boxes: list[Box], labels: list[Label], colors: Mapping[str, str]) -> float:
    """Add what the colours of parts mean; returns where it ends."""
    note = "Above: the share of the ranks' time that is not spent in waiting. Below, by part:"
    labels.append(Label(x=_LEFT, y=y + 10, text=note, color=_GREY))
    x = _LEFT + text_width(note) + 12
    for name, fill in (*colors.items(), ("others", _OTHERS)):
        boxes.append(Box(x=x, y=y + 4, width=12, height=12, fill=fill))
        labels.append(Label(x=x + 16, y=y + 10, text=name, color=_GREY))
        x += text_width(name) + 28
    return y + 26
