"""Draws a few layers of a plan: a lane for each stream, a bar for each piece of work, the critical path emphasised."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from sgl_batch.cli.plan.canvas import FONT_SIZE, SUFFIXES, Box, Drawing, Label, text_width, write_drawing
from sgl_batch.errors import ConfigError
from sgl_batch.planner.layer_bars import Bar, PassPicture
from sgl_batch.planner.layer_dag import COMPUTE, EXCHANGED, TO_DEVICE, TO_STORE, WEIGHTS

_LANES = {
    COMPUTE: "compute",
    EXCHANGED: "exchange",
    TO_DEVICE: "copies in: KV",
    WEIGHTS: "copies in: weights",
    TO_STORE: "copies out: KV",
}
_CRITICAL, _BESIDE, _SHADE, _EDGE, _GREY = "#e8702a", "#a9c4dc", "#f3f3f3", "#ffffff", "#666666"
_WIDTH, _LEFT, _RIGHT = 1400, 150, 20
_BAR, _UNDER, _TITLE, _HEAD, _AXIS, _GAP = 30, 18, 30, 22, 26, 14
_PADDING, _TICKS, _LEAST = 6, 8, 1


def check_picture(target: Path, flag: str = "--picture") -> None:
    """Raise ConfigError for a file that no picture can be, before anything is predicted. `flag`: what names it."""
    if target.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{flag} is {target}; its name ends in {' or '.join(SUFFIXES)}")
    if not target.parent.is_dir():
        raise ConfigError(f"{flag} is {target}, and there is no directory {target.parent}")
    text_width("")


def write_picture(target: Path, passes: Sequence[PassPicture], *, title: str) -> None:
    """Draw the passes one below the other. Raises ConfigError where the file cannot be written."""
    write_drawing(target, drawing_of(passes, title=title))


def drawing_of(passes: Sequence[PassPicture], *, title: str) -> Drawing:
    """Return the drawing of the passes: no label of it lies on another one."""
    boxes: list[Box] = []
    labels = [Label(x=_GAP, y=_TITLE / 2 + 4, text=title, size=FONT_SIZE + 3)]
    labels += _legend(boxes)
    y = float(_TITLE + _GAP)
    for one in passes:
        y = _Panel(one, y).draw(boxes, labels) + _GAP
    return Drawing(width=_WIDTH, height=y, boxes=boxes, labels=labels)


def _legend(boxes: list[Box]) -> list[Label]:
    labels, x, y = [], float(_WIDTH - _RIGHT), _TITLE / 2 + 4
    for text, fill in (("beside it", _BESIDE), ("critical path", _CRITICAL)):
        labels.append(Label(x=x, y=y, text=text, anchor="end"))
        x -= text_width(text) + 20
        boxes.append(Box(x=x, y=y - 6, width=14, height=12, fill=fill))
        x -= 14
    return labels


class _Panel:
    """One pass: its title, a strip that names the layers, its lanes, and an axis of time."""

    def __init__(self, shown: PassPicture, top: float) -> None:
        self._shown, self._top = shown, top
        self._per_s = (_WIDTH - _LEFT - _RIGHT) / max(shown.end_s, 1e-12)

    def draw(self, boxes: list[Box], labels: list[Label]) -> float:
        """Add everything; returns where the panel ends."""
        each = f"each further layer takes {_ms(self._shown.layer_s)}"
        labels.append(Label(x=_GAP, y=self._top + _TITLE / 2, text=f"{self._shown.title}; {each}", size=FONT_SIZE + 1))
        lanes = [stream for stream in _LANES if any(bar.stream == stream for bar in self._shown.bars)]
        first = self._top + _TITLE + _HEAD
        bottom = first + len(lanes) * (_BAR + _UNDER)
        self._layers(boxes, labels, bottom)
        unnamed: dict[str, None] = {}
        for index, stream in enumerate(lanes):
            y = first + index * (_BAR + _UNDER)
            labels.append(Label(x=_LEFT - 10, y=y + _BAR / 2, text=_LANES[stream], anchor="end"))
            unnamed |= self._lane([bar for bar in self._shown.bars if bar.stream == stream], y, boxes, labels)
        return self._axis(bottom, boxes, labels, list(unnamed))

    def _x(self, seconds: float) -> float:
        return _LEFT + seconds * self._per_s

    def _layers(self, boxes: list[Box], labels: list[Label], bottom: float) -> None:
        """Shade every other layer, from the start of its computation to that of the next."""
        starts: dict[int, float] = {}
        for bar in self._shown.bars:
            if bar.stream == COMPUTE:
                starts.setdefault(bar.layer, bar.start_s)
        for layer, start_s in starts.items():
            left, right = self._x(start_s), self._x(starts.get(layer + 1, self._shown.end_s))
            y = self._top + _TITLE
            if layer % 2:
                boxes.append(Box(x=left, y=y, width=right - left, height=bottom - y, fill=_SHADE))
            name = f"layer {layer + 1}"
            if text_width(name) < right - left:
                labels.append(Label(x=(left + right) / 2, y=y + _HEAD / 2, text=name, anchor="middle", color=_GREY))

    def _lane(self, bars: Sequence[Bar], y: float, boxes: list[Box], labels: list[Label]) -> dict[str, None]:
        """Add the bars of a lane; returns the names that found no room.

        A kind of work is named in its bars where all of them in a layer have room for it, else once below them.
        """
        free_from, unnamed = float(_LEFT), dict[str, None]()
        for _, of_layer in groupby(bars, key=lambda bar: bar.layer):
            kinds: dict[str, list[Bar]] = {}
            for bar in of_layer:
                kinds.setdefault(bar.kind, []).append(bar)
            below: list[list[Bar]] = []
            for alike in kinds.values():
                if not self._add_bars(alike, y, boxes, labels):
                    below.append(alike)
            name = "; ".join(_name(alike) for alike in below)
            x = self._place(name, [bar for alike in below for bar in alike], free_from)
            if x is None:
                unnamed |= dict.fromkeys(map(_name, below))
            elif name:
                labels.append(Label(x=x, y=y + _BAR + _UNDER / 2, text=name, color=_GREY))
                free_from = x + text_width(name) + 2 * _PADDING
        return unnamed

    def _add_bars(self, alike: Sequence[Bar], y: float, boxes: list[Box], labels: list[Label]) -> bool:
        """Add bars of one kind, with their names where all have room for them. Return whether they have."""
        is_named = all(text_width(_name([bar])) + _PADDING < bar.seconds * self._per_s for bar in alike)
        for bar in alike:
            x, width = self._x(bar.start_s), bar.seconds * self._per_s
            edge = _EDGE if width > 3 * _LEAST else None
            fill = _CRITICAL if bar.critical else _BESIDE
            boxes.append(Box(x=x, y=y, width=max(width, _LEAST), height=_BAR, fill=fill, edge=edge))
            if is_named:
                labels.append(Label(x=x + width / 2, y=y + _BAR / 2, text=_name([bar]), anchor="middle"))
        return is_named

    def _place(self, name: str, bars: Sequence[Bar], free_from: float) -> float | None:
        """Return where a name below these bars begins; None where it would lie on another, or beside all of them."""
        if not bars:
            return free_from
        wide = text_width(name)
        left = self._x(min(bar.start_s for bar in bars))
        right = self._x(max(bar.start_s + bar.seconds for bar in bars))
        x = min(max((left + right - wide) / 2, free_from), _WIDTH - _RIGHT - wide)
        return None if x < free_from or x > right or x + wide < left else x

    def _axis(self, y: float, boxes: list[Box], labels: list[Label], unnamed: list[str]) -> float:
        boxes.append(Box(x=_LEFT, y=y, width=_WIDTH - _LEFT - _RIGHT, height=1, fill=_GREY))
        step = _round_step(self._shown.end_s / _TICKS)
        for number in range(int(self._shown.end_s / step) + 1):
            x = self._x(number * step)
            text = f"{1000 * number * step:.6g}" + (" ms" if number == 0 else "")
            boxes.append(Box(x=x, y=y, width=1, height=5, fill=_GREY))
            if x + text_width(text) / 2 < _WIDTH:
                labels.append(Label(x=x, y=y + _AXIS / 2 + 2, text=text, anchor="middle", color=_GREY))
        y += _AXIS
        notes = ["Bars too narrow for a name: " + "; ".join(unnamed)] if unnamed else []
        for line in (line for note in (*notes, *self._shown.notes) for line in _lines(note)):
            labels.append(Label(x=_GAP, y=y + _UNDER / 2, text=line, color=_GREY))
            y += _UNDER
        return y


def _name(bars: Sequence[Bar]) -> str:
    """Return the name of a bar with its time, or of several alike."""
    mean_s = sum(bar.seconds for bar in bars) / len(bars)
    return f"{bars[0].kind} {_ms(mean_s)}" if len(bars) == 1 else f"{len(bars)} x {bars[0].kind}, {_ms(mean_s)} each"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def _round_step(seconds: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is not less."""
    power = 1e-9
    while 10 * power < seconds:
        power *= 10
    return next((factor * power for factor in (1, 2, 5) if factor * power >= seconds), 10 * power)


def _lines(text: str) -> list[str]:
    """Return the text in lines that fit the sheet."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if text_width(longer) > _WIDTH - 2 * _GAP:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
