"""Makes the wires of this directory, and the virtual ranks of core's tests, importable for the tests here."""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent / "core"), str(_HERE.parents[1])]
