"""The picture of a plan: what is drawn, that labels never overlap, and which files can be written."""

from __future__ import annotations

import sys
from itertools import combinations
from xml.etree import ElementTree

import pytest

from sgl_batch.cli.plan.canvas import Label, text_width
from sgl_batch.cli.plan.picture import check_picture, drawing_of, write_picture
from sgl_batch.errors import ConfigError
from sgl_batch.planner.layer_bars import pass_picture
from sgl_batch.planner.layer_dag import LayerWork, SubBatch, Work

SVG = "{http://www.w3.org/2000/svg}"


def work(sub_batches: int, *, attention: float = 1e-4, restore: float = 5e-5, fetch: float = 9e-4) -> LayerWork:
    sub = SubBatch(attention=Work(seconds=attention), restore=Work(seconds=restore), offload=Work(seconds=restore / 3))
    return LayerWork(
        sub_batches=[sub] * sub_batches,
        experts=Work(seconds=4e-4),
        exchange=Work(seconds=1e-6),
        fetch=Work(seconds=fetch),
    )


SHAPES = {
    "few": work(2),
    "many": work(40),
    "thin": work(8, attention=1e-6, restore=1e-7),
    "slow weights": work(3, fetch=9e-3),
}


def box_of(label: Label) -> tuple[float, float, float, float]:
    wide = text_width(label.text, label.size)
    left = {"start": label.x, "middle": label.x - wide / 2, "end": label.x - wide}[label.anchor]
    return left, left + wide, label.y - label.size / 2, label.y + label.size / 2


@pytest.mark.parametrize("name", SHAPES)
def test_no_label_lies_on_another_or_beyond_the_sheet(name):
    drawing = drawing_of([pass_picture(name, SHAPES[name]), pass_picture("again", SHAPES[name])], title="a plan")
    boxes = {label: box_of(label) for label in drawing.labels}
    for (left, right, top, bottom), label in zip(boxes.values(), boxes, strict=True):
        assert left >= 0, label
        assert right <= drawing.width, label
        assert top >= 0, label
        assert bottom <= drawing.height, label
    for (one, a), (other, b) in combinations(boxes.items(), 2):
        assert a[1] <= b[0] or b[1] <= a[0] or a[3] <= b[2] or b[3] <= a[2], f"{one.text!r} lies on {other.text!r}"


def test_a_bar_is_named_with_its_module_and_milliseconds():
    texts = [label.text for label in drawing_of([pass_picture("", SHAPES["few"])], title="").labels]
    assert any(text.startswith("experts 0.4 ms") for text in texts)
    assert {"compute", "exchange", "copies in: KV", "copies in: weights", "copies out: KV"} <= set(texts)


def test_what_is_too_narrow_for_a_name_is_named_below():
    texts = [label.text for label in drawing_of([pass_picture("", SHAPES["thin"])], title="").labels]
    assert any(text.startswith("Bars too narrow for a name: ") for text in texts)


def test_an_svg_has_a_box_for_each_bar_and_escapes_its_texts(tmp_path):
    target = tmp_path / "plan.svg"
    shown = pass_picture("a < b", SHAPES["few"])
    write_picture(target, [shown], title="<plan>")
    root = ElementTree.parse(target).getroot()
    assert root.findtext(f"{SVG}text") == "<plan>"
    fills = [box.get("fill") for box in root.iter(f"{SVG}rect")]
    assert fills.count("#e8702a") == 1 + sum(bar.critical for bar in shown.bars)


def test_a_png_is_written(tmp_path):
    target = tmp_path / "plan.PNG"
    write_picture(target, [pass_picture("", SHAPES["few"])], title="plan")
    assert target.read_bytes().startswith(b"\x89PNG")


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_predicted(tmp_path):
    with pytest.raises(ConfigError, match=r"ends in \.svg or \.png"):
        check_picture(tmp_path / "plan.jpg")
    with pytest.raises(ConfigError, match="no directory"):
        check_picture(tmp_path / "none" / "plan.svg")
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        write_picture(tmp_path / "folder.svg", [pass_picture("", SHAPES["few"])], title="plan")


def test_without_pillow_one_line_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match="pip install pillow"):
        check_picture(tmp_path / "plan.svg")
