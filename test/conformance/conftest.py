"""Makes the cases, the reference and the rank processes importable for the tests of this directory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from rank_processes import ProcessShelf


@pytest.fixture(scope="session")
def process_shelf() -> Iterator[ProcessShelf]:
    """Rank processes, started once for each kind and number, and ended with the session."""
    shelf = ProcessShelf()
    yield shelf
    shelf.close()
