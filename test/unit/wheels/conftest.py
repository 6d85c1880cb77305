"""Puts scripts/ where its own command finds it, and this folder's helpers where its tests do."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[3] / "scripts"), str(Path(__file__).resolve().parent)]
