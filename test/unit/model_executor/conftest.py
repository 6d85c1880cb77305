"""Prepares this process for SGLang's own classes, and makes the toy model importable for these tests."""

from __future__ import annotations

import sys
from pathlib import Path

from sgl_batch.sglang_adapter import bootstrap

bootstrap.prepare()
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
