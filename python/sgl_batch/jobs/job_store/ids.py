"""The ids of files and jobs: random, checked by pattern before they enter a path; decides nothing about owners."""

from __future__ import annotations

import re
import secrets

_FILE_ID = re.compile(r"file-[0-9a-f]{24}", re.ASCII)
_BATCH_ID = re.compile(r"batch_[0-9a-f]{24}", re.ASCII)


def new_file_id() -> str:
    """An id that nobody can guess and no other file has."""
    return f"file-{secrets.token_hex(12)}"


def new_batch_id() -> str:
    """An id that nobody can guess and no other job has."""
    return f"batch_{secrets.token_hex(12)}"


def is_file_id(text: str) -> bool:
    """Whether `text` is an id of a file of ours, so that it may enter a path."""
    return _FILE_ID.fullmatch(text) is not None


def is_batch_id(text: str) -> bool:
    """Whether `text` is an id of a job of ours, so that it may enter a path."""
    return _BATCH_ID.fullmatch(text) is not None
