"""Owns the import path of this directory's cases and references, and the rank processes that its tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from rank_processes import ProcessCache


@pytest.fixture(scope="session")
def process_cache() -> Iterator[ProcessCache]:
    """Rank processes, started once for each device and number of ranks, and ended with the session."""
    cache = ProcessCache()
    yield cache
    cache.close()
