"""The hash of a model directory."""

from __future__ import annotations

import json
import struct

import pytest

from sgl_batch.file_run import model_hash as module
from sgl_batch.file_run.model_hash import model_hash


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model whose weights are large enough to be sampled."""
    monkeypatch.setattr(module, "SMALL_FILE_BYTES", 1000)
    monkeypatch.setattr(module, "SAMPLE_BYTES", 10)
    header = json.dumps({"w": {"shape": [5]}}).encode()
    weights = struct.pack("<Q", len(header)) + header + bytes(range(250)) * 100
    (tmp_path / "model.safetensors").write_bytes(weights)
    (tmp_path / "config.json").write_text('{"layers": 2}')
    return tmp_path


def test_the_same_content_has_the_same_hash_and_other_files_do_not_matter(model):
    before = model_hash(model)
    (model / "README.md").write_text("hello")
    (model / "original").mkdir()
    (model / "original" / "config.json").write_text("{}")
    assert model_hash(model) == before


@pytest.mark.parametrize("offset", [3, 20, -1])
def test_a_byte_of_the_header_the_start_or_the_end_changes_it(model, offset):
    before = model_hash(model)
    path = model / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)
    assert model_hash(model) != before


def test_names_sizes_and_small_files_change_it(model):
    hashes = [model_hash(model)]
    (model / "config.json").write_text('{"layers": 3}')
    hashes.append(model_hash(model))
    (model / "config.json").rename(model / "other.json")
    hashes.append(model_hash(model))
    with (model / "model.safetensors").open("ab") as file:
        file.write(b"x")
    hashes.append(model_hash(model))
    assert len(set(hashes)) == 4
