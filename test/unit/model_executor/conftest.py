"""Prepares this process for SGLang's own classes, and makes the toy model and core's builders importable here."""

from __future__ import annotations

import sys
from pathlib import Path

from sgl_batch.sglang_adapter import bootstrap

bootstrap.prepare()
_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent / "core"), str(_HERE.parents[1])]
