"""Puts the benchmark's modules and the stand-ins of this directory on the import path."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "benchmark"), str(ROOT / "scripts"), str(Path(__file__).parent)]
