"""Owns this user's cache: its directory, and JSON files in it, each named by a hash and written in one step."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def cache_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return sgl_batch's directory in the cache of this user. It may not exist."""
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sgl_batch"


def hashed_name(key: object) -> str:
    """Return the name of a file, the same for equal keys. `key`: of what JSON has, other values by their texts."""
    text = json.dumps(key, sort_keys=True, default=str)
    return f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def write_json(path: Path, content: object) -> None:
    """Write a file and its directory. A reader sees the old file or the new one, whole. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as draft:
        try:
            json.dump(content, draft, indent=1)
            draft.flush()
            os.replace(draft.name, path)
        except BaseException:
            os.unlink(draft.name)
            raise
