"""Reads which versions of packages are installed."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata


def version_of(distribution: str) -> str | None:
    """Return the version of an installed package, or None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def versions_of(distributions: Iterable[str]) -> dict[str, str | None]:
    """Return the version of each package, as `version_of` does."""
    return {name: version_of(name) for name in distributions}
