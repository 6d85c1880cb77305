"""Puts the benchmark's modules where its own command finds them, and the stand-ins of this directory beside them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[3] / "benchmark"), str(Path(__file__).parent)]
