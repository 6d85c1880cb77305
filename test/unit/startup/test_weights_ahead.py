"""Weights are read ahead where the loader reads whole files, into at most half of the free memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sgl_batch.startup import weights_ahead as module
from sgl_batch.startup.weights_ahead import resident_files, weights_ahead


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Path], int]]:
    """Return the list to which files and limits of what would be read are added."""
    found: list[tuple[list[Path], int]] = []

    def note(files: list[Path], most_bytes: int, *, to_read: Callable[[Sequence[Path]], Sequence[Path]] = list) -> None:
        found.append((list(to_read(files)), most_bytes))

    monkeypatch.setattr(module, "ReadAhead", note)
    return found


def _model(directory: Path) -> str:
    (directory / "model.safetensors").write_bytes(b"x")
    return str(directory)


def _free() -> int:
    return 1000


def test_resident_weights_are_read_into_half_of_the_free_memory(tmp_path: Path, asked: list[Any]) -> None:
    weights_ahead(resident_files(_model(tmp_path), weights="resident"), free=_free)
    assert asked == [([tmp_path / "model.safetensors"], 500)]


@pytest.mark.parametrize(
    "arguments",
    [{"weights": "streamed"}, {"weights": "resident", "load_format": "dummy"}],
    ids=["streamed", "dummy weights"],
)
def test_weights_that_are_not_loaded_whole_are_not_read(
    tmp_path: Path, asked: list[Any], arguments: dict[str, Any]
) -> None:
    weights_ahead(resident_files(_model(tmp_path), **arguments), free=_free)
    assert asked == [([], 0)]


@pytest.mark.parametrize("name", [None, "no/such/model", "s3://bucket/model", "a b"])
def test_a_model_that_is_not_on_this_machine_is_not_read(name: str | None, asked: list[Any]) -> None:
    weights_ahead(resident_files(name, weights="resident"), free=_free)
    assert [files for files, _ in asked] == [[]]


def test_unreadable_figures_of_memory_fail_no_start(tmp_path: Path, asked: list[Any]) -> None:
    def fail() -> int:
        raise OSError("no /proc")

    weights_ahead(resident_files(_model(tmp_path), weights="resident"), free=fail)
    assert asked == [([], 0)]


@pytest.mark.parametrize(("num_ranks", "names"), [(1, ["model.bin"]), (2, ["model.bin", "model.safetensors"])])
def test_what_the_loader_of_one_rank_reads_past_the_page_cache_is_not_read_ahead(
    tmp_path: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch, num_ranks: int, names: list[str]
) -> None:
    files = [tmp_path / "model.bin", tmp_path / "model.safetensors"]
    monkeypatch.setattr(module, "weight_files", lambda _: files)
    monkeypatch.setattr(module, "files_to_read_past_it", list)
    weights_ahead(resident_files(str(tmp_path), weights="resident"), num_ranks=num_ranks, free=_free)
    assert [file.name for file in asked[0][0]] == names
