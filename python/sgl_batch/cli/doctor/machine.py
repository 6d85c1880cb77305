"""Owns what the doctor's checks read of a machine: its files, environment and packages.

Tests replace it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgl_batch.installed_versions import version_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine. `root`: the directory of /proc and /sys. `model`: the directory of the model to check, if any.

    `load` imports a module by its name. `version_of` returns the version of an installed package, or None.
    """

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    model: Path | None = None
    load: Callable[[str], Any] = importlib.import_module
    version_of: Callable[[str], str | None] = version_of

    def text(self, path: str) -> str | None:
        """Return the text of a file below `root`, or None where it does not exist or cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    @property
    def has_gpu(self) -> bool:
        """Whether torch finds a GPU. It imports torch; False where that fails."""
        try:
            return bool(self.load("torch").cuda.is_available())
        except (ImportError, OSError):
            return False
