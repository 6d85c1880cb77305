"""Makes and checks the ids of files and jobs. They are random, and are checked before they enter a path."""

from __future__ import annotations

import re
import secrets

_FILE_ID = re.compile(r"file-[0-9a-f]{24}", re.ASCII)
_BATCH_ID = re.compile(r"batch_[0-9a-f]{24}", re.ASCII)


def new_file_id() -> str:
    """Return a new id of a file: unique, and impossible to guess."""
    return f"file-{secrets.token_hex(12)}"


def new_batch_id() -> str:
    """Return a new id of a job: unique, and impossible to guess."""
    return f"batch_{secrets.token_hex(12)}"


def is_file_id(text: str) -> bool:
    """Return whether `text` has the form of a file's id, so that it may enter a path."""
    return _FILE_ID.fullmatch(text) is not None


def is_batch_id(text: str) -> bool:
    """Return whether `text` has the form of a job's id, so that it may enter a path."""
    return _BATCH_ID.fullmatch(text) is not None
