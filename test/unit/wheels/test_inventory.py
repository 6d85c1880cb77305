"""Tests that all that pip prints of a machine is read, and no line is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from wheels.failure import WheelhouseError
from wheels.inventory import may_be_replaced, read_inventory


def written(tmp_path: Path, text: str) -> Path:
    """The text as a file."""
    path = tmp_path / "have.txt"
    path.write_text(text, encoding="utf-8")
    return path


def test_freeze_and_list_give_the_same(tmp_path: Path) -> None:
    frozen = (
        "Jinja2==3.1.6\ntorch==2.11.0+cu130\ntriton @ file:///x/triton-3.6.0-cp312-cp312-linux_x86_64.whl#sha256=1\n"
    )
    listed = "Package Version\n------- -------\nJinja2 3.1.6\ntorch   2.11.0+cu130\ntriton  3.6.0  /x/editable\n"
    expected = {"jinja2": "3.1.6", "torch": "2.11.0+cu130", "triton": "3.6.0"}
    assert read_inventory(written(tmp_path, frozen)) == expected
    assert read_inventory(written(tmp_path, listed)) == expected


def test_names_are_compared_as_registries_do(tmp_path: Path) -> None:
    assert read_inventory(written(tmp_path, "Typing_Extensions==4.15.0\n")) == {"typing-extensions": "4.15.0"}


def test_a_line_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(WheelhouseError, match=r"line 2: no name and version in 'torch>=2'.*take the line out"):
        read_inventory(written(tmp_path, "numpy==2.3.5\ntorch>=2\n"))


def test_an_empty_list_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WheelhouseError, match="names no package"):
        read_inventory(written(tmp_path, "# nothing\n"))
    with pytest.raises(WheelhouseError, match="cannot be read"):
        read_inventory(tmp_path / "none.txt")


def test_torch_and_its_libraries_are_not_replaced() -> None:
    assert not any(map(may_be_replaced, ("torch", "triton", "nvidia-cublas")))
    assert may_be_replaced("numpy")
