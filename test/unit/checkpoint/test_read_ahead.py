"""A checkpoint's files are read ahead in the loader's order, up to a limit, and never at the price of a start."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from sgl_batch.checkpoint import read_ahead
from sgl_batch.checkpoint.read_ahead import PIECE_BYTES, ReadAhead, weight_files


def _names(files: Sequence[Path]) -> list[str]:
    return [file.name for file in files]


def _make(directory: Path, *names: str, size: int = 1) -> list[Path]:
    for name in names:
        (directory / name).write_bytes(b"x" * size)
    return [directory / name for name in names]


def _index(directory: Path, text: str) -> None:
    (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def test_safetensors_files_are_read_in_the_order_of_their_names_and_others_are_not(tmp_path: Path) -> None:
    _make(tmp_path, "model-2.safetensors", "model-1.safetensors", "pytorch_model.bin", "config.json")
    assert _names(weight_files(tmp_path)) == ["model-1.safetensors", "model-2.safetensors"]


def test_files_that_the_index_does_not_name_are_not_read(tmp_path: Path) -> None:
    _make(tmp_path, "consolidated.safetensors", "model.safetensors")
    _index(tmp_path, json.dumps({"weight_map": {"a": "model.safetensors"}}))
    assert _names(weight_files(tmp_path)) == ["model.safetensors"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": ["b"]}}'])
def test_an_unreadable_index_is_left_to_the_loader(tmp_path: Path, text: str) -> None:
    _make(tmp_path, "model.safetensors")
    _index(tmp_path, text)
    assert _names(weight_files(tmp_path)) == ["model.safetensors"]


def test_without_safetensors_pickled_files_are_read(tmp_path: Path) -> None:
    _make(tmp_path, "pytorch_model.bin", "training_args.pt")
    assert _names(weight_files(tmp_path)) == ["pytorch_model.bin"]


def test_a_file_that_is_a_model_is_read(tmp_path: Path) -> None:
    (gguf,) = _make(tmp_path, "model.gguf")
    assert weight_files(gguf) == [gguf]


def test_a_directory_without_weights_or_that_is_missing_has_none(tmp_path: Path) -> None:
    assert weight_files(tmp_path) == weight_files(tmp_path / "missing") == []


class _Reads:
    """Records which pieces are read; calls `on_read` for each."""

    def __init__(self, on_read: Callable[[], object] = lambda: None) -> None:
        self.pieces: list[tuple[int, int]] = []
        self._on_read = on_read

    def __call__(self, _descriptor: int, offset: int, num_bytes: int) -> None:
        self.pieces.append((offset, num_bytes))
        self._on_read()


def test_files_are_read_whole_in_pieces_one_after_the_other(tmp_path: Path) -> None:
    first, second = _make(tmp_path, "1", "2", size=PIECE_BYTES + 5)
    reads = _Reads()
    ReadAhead([first, second], 1 << 40, reads).run()
    assert reads.pieces == [(0, PIECE_BYTES), (PIECE_BYTES, 5)] * 2


def test_no_more_is_read_than_the_limit(tmp_path: Path) -> None:
    files = _make(tmp_path, "1", "2", "3", size=10)
    reads = _Reads()
    ReadAhead(files, 14, reads).run()
    assert reads.pieces == [(0, 10), (0, 4)]


def test_a_file_that_cannot_be_opened_ends_the_reading(tmp_path: Path) -> None:
    files = _make(tmp_path, "1", "2")
    reads = _Reads()
    ReadAhead([files[0], tmp_path / "missing", files[1]], 100, reads).run()
    assert len(reads.pieces) == 1


def test_a_file_that_cannot_be_read_ends_the_reading(tmp_path: Path) -> None:
    def fail(*_: int) -> None:
        raise OSError("no such advice")

    with ReadAhead(_make(tmp_path, "1", "2"), 100, fail) as ahead:
        pass
    ahead.run()


def test_leaving_ends_the_thread_after_the_piece_that_it_reads(tmp_path: Path) -> None:
    ahead: list[ReadAhead] = []
    reads = _Reads(lambda: ahead[0].stop())
    ahead.append(ReadAhead(_make(tmp_path, "1", "2", size=PIECE_BYTES + 1), 1 << 40, reads))
    with ahead[0]:
        pass
    ahead[0].run()
    assert len(reads.pieces) <= 1


def test_nothing_to_read_starts_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise AssertionError("a thread was started")

    monkeypatch.setattr(read_ahead.threading.Thread, "start", refuse)
    with ReadAhead([], 100):
        pass
    with ReadAhead(_make(tmp_path, "1"), 0):
        pass


def test_a_piece_is_read_without_a_copy_also_at_the_end_of_a_file(tmp_path: Path) -> None:
    (file,) = _make(tmp_path, "1", size=10_000)
    with file.open("rb") as opened:
        read_ahead.read_piece(opened.fileno(), 0, 10_000)
        read_ahead.read_piece(opened.fileno(), 8192, PIECE_BYTES)


def test_only_the_files_that_are_worth_it_are_read(tmp_path: Path) -> None:
    files = _make(tmp_path, "1", "2", "3", size=10)
    reads = _Reads()
    ReadAhead(files, 100, reads, to_read=lambda given: given[1:]).run()
    assert reads.pieces == [(0, 10), (0, 10)]


def test_a_choice_that_fails_ends_the_reading(tmp_path: Path) -> None:
    def fail(_: Sequence[Path]) -> list[Path]:
        raise OSError("no such device")

    reads = _Reads()
    ReadAhead(_make(tmp_path, "1"), 100, reads, to_read=fail).run()
    assert reads.pieces == []
