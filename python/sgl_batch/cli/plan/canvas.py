"""Writes rectangles, lines and texts as SVG, or as PNG by Pillow. What is drawn where is decided elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from sgl_batch.errors import ConfigError

SUFFIXES = (".svg", ".png")
FONT_SIZE = 13
# Points of a PNG for each unit: texts stay sharp on a screen with small points.
_SCALE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A filled rectangle with its upper left corner at (x, y)."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    edge: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A line of text, centred on the height y; `anchor`: which point of it lies at x: "start", "middle" or "end"."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    color: str = "#222222"
    size: int = FONT_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """What is drawn, in order, on a white sheet."""

    width: float
    height: float
    boxes: Sequence[Box]
    labels: Sequence[Label]


def text_width(text: str, size: int = FONT_SIZE) -> float:
    """Return the width of a text. Raises ConfigError without Pillow."""
    return float(_font(size).getlength(text))


def write_drawing(target: Path, drawing: Drawing, flag: str = "--picture") -> None:
    """Write the drawing in the format that the name ends with. Raises ConfigError where it cannot be written.

    `flag`: the option that names the file.
    """
    try:
        if target.suffix.lower() == ".svg":
            target.write_text(_svg(drawing), encoding="utf-8")
        else:
            _png(drawing).save(target)
    except OSError as error:
        raise ConfigError(f"{flag} {target} cannot be written: {error}") from error


def _svg(drawing: Drawing) -> str:
    width, height = round(drawing.width), round(drawing.height)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for box in drawing.boxes:
        edge = f' stroke="{box.edge}"' if box.edge else ""
        lines.append(
            f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" '
            f'fill="{box.fill}"{edge}/>'
        )
    for label in drawing.labels:
        lines.append(
            f'<text x="{label.x:.1f}" y="{label.y:.1f}" fill="{label.color}" font-size="{label.size}" '
            f'text-anchor="{label.anchor}" dominant-baseline="central">{escape(label.text)}</text>'
        )
    return "\n".join([*lines, "</svg>"]) + "\n"


def _png(drawing: Drawing) -> Any:
    image_module, draw_module, _ = _pillow()
    image = image_module.new("RGB", (round(_SCALE * drawing.width), round(_SCALE * drawing.height)), "#ffffff")
    draw = draw_module.Draw(image)
    for box in drawing.boxes:
        corner = (_SCALE * (box.x + box.width), _SCALE * (box.y + box.height))
        draw.rectangle(((_SCALE * box.x, _SCALE * box.y), corner), fill=box.fill, outline=box.edge, width=1)
    anchors = {"start": "lm", "middle": "mm", "end": "rm"}
    for label in drawing.labels:
        at = (_SCALE * label.x, _SCALE * label.y)
        draw.text(at, label.text, fill=label.color, font=_font(_SCALE * label.size), anchor=anchors[label.anchor])
    return image


def _font(size: int) -> Any:
    return _pillow()[2].load_default(size)


def _pillow() -> tuple[Any, Any, Any]:
    """Return Pillow's modules; they are imported only where something is drawn."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise ConfigError(f"a picture needs Pillow, which is not there ({error}): pip install pillow") from error
    return Image, ImageDraw, ImageFont
