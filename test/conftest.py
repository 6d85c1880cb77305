"""Owns what every suite shares: where the repository is, and that no test reaches for the network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before any test module imports transformers or starts an engine: a model is a directory, never a download.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The repository's root directory."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def data_dir(repo_root: Path) -> Path:
    """The directory of small data files that ship with the tests."""
    return repo_root / "test" / "data"
