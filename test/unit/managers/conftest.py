"""Makes the wires of this directory, and the virtual ranks of core's tests, importable for the tests here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "core")]
