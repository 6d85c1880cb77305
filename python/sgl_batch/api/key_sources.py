"""Owns where the server's keys come from: a flag, a file or the environment. auth.py decides what a key opens.

On the command line every user of the machine can read a key (ps); in a file or the environment they cannot.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sgl_batch.errors import ConfigError

_MOST_BYTES = 4096
# Name in the parsed arguments -> environment variable.
VARIABLES = {"api_key": "SGL_BATCH_API_KEY", "admin_api_key": "SGL_BATCH_ADMIN_API_KEY"}
_WHAT = {"api_key": "the key that requests need", "admin_api_key": "the key that control of the engine needs"}


def add_key_file_flags(group: Any) -> None:
    """Add the flags that SGLang does not have."""
    for name, variable in VARIABLES.items():
        flag = _flag(name)
        group.add_argument(
            f"{flag}-file",
            metavar="FILE",
            help=f"file with {_WHAT[name]}; or {flag} (ps shows it), or {variable}",
        )


def key_of(name: str, args: argparse.Namespace, environment: Mapping[str, str]) -> str | None:
    """Return the key from the flag, else the file, else the environment, else None. Raises ConfigError."""
    flag, variable = _flag(name), VARIABLES[name]
    given, file = getattr(args, name), getattr(args, f"{name}_file")
    if given is not None and file is not None:
        raise ConfigError(f"{flag} and {flag}-file both give the key; leave one of them out")
    if given is not None:
        return _checked(str(given), flag)
    if file is not None:
        return _checked(_read(Path(file), flag), f"{flag}-file {file}")
    found = environment.get(variable)
    return None if found is None else _checked(found, variable)


def _read(path: Path, flag: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        text = data.decode("utf-8").removeprefix("\ufeff").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag}-file {path} cannot be read: {error}") from error
    if len(data) > _MOST_BYTES or len(text.splitlines()) > 1:
        raise ConfigError(f"{flag}-file {path} has more than one line; write the key alone into it")
    return text


def _checked(key: str, where: str) -> str:
    """Return the key, where a header can carry it. Raises ConfigError."""
    if not key:
        raise ConfigError(f"{where} is empty; leave it out, or give a key")
    if not (key.isascii() and key.isprintable()) or key != key.strip():
        raise ConfigError(f"{where} has characters that a header cannot carry, or blanks at its ends; give another key")
    return key


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
