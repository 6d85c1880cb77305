"""Files are read past the page cache if they are not in it, are large, and their disk is fast."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from sgl_batch.weights import page_cache
from sgl_batch.weights.page_cache import cached_share, direct_rate, files_to_read_past_it

MIB = 1 << 20


def make(directory: Path, name: str, num_bytes: int) -> Path:
    file = directory / name
    file.write_bytes(os.urandom(num_bytes))
    return file


def sparse(directory: Path, name: str, num_bytes: int) -> Path:
    file = directory / name
    with file.open("wb") as opened:
        opened.truncate(num_bytes)
    return file


def test_the_share_of_a_file_in_the_page_cache_is_counted(tmp_path: Path) -> None:
    file = make(tmp_path, "1", 4 * MIB)
    assert cached_share(file) == 1.0
    assert cached_share(sparse(tmp_path, "2", 4 * MIB)) == 0.0
    with sparse(tmp_path, "3", 4 * MIB).open("rb+", buffering=0) as half:
        half.write(bytes(2 * MIB))
        assert cached_share(tmp_path / "3") == 0.5
    assert cached_share(sparse(tmp_path, "4", 0)) == 1.0


def test_a_disk_is_read_past_the_page_cache_to_find_its_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_cache, "_rates", {})
    files = [make(tmp_path, "small", 100), make(tmp_path, "large", 5 * MIB)]
    assert direct_rate(files) > 0


def test_a_disk_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([2e9, 1e9])
    monkeypatch.setattr(page_cache, "_rates", {})
    monkeypatch.setattr(page_cache, "_rate_of", lambda _: next(rates))
    assert [direct_rate([make(tmp_path, name, 100)]) for name in ("1", "2")] == [2e9, 2e9]


@pytest.fixture
def large(tmp_path: Path) -> list[Path]:
    """Return files that are not in the page cache, and together large enough."""
    return [sparse(tmp_path, f"{number}", 200 * MIB) for number in range(3)]


@pytest.mark.parametrize(("rate", "taken"), [(1.4e9, 0), (1.6e9, 3)])
def test_files_of_a_fast_disk_are_taken(
    large: list[Path], monkeypatch: pytest.MonkeyPatch, rate: float, taken: int
) -> None:
    monkeypatch.setattr(page_cache, "direct_rate", lambda _: rate)
    assert files_to_read_past_it(large) == large[:taken]


def test_files_in_the_page_cache_are_not_taken(
    large: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_cache, "direct_rate", lambda _: 9e9)
    cached = make(tmp_path, "cached", MIB)
    assert files_to_read_past_it([large[0], cached, *large[1:]]) == large


def test_little_is_not_worth_a_look_at_the_disk(large: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Sequence[Path]) -> float:
        raise AssertionError("the disk was read")

    monkeypatch.setattr(page_cache, "direct_rate", fail)
    assert files_to_read_past_it(large[:1]) == []


def test_a_file_system_without_direct_reads_takes_none(
    large: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Sequence[Path]) -> float:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(page_cache, "direct_rate", fail)
    assert files_to_read_past_it(large) == []
    assert files_to_read_past_it([tmp_path / "missing"]) == []
