"""Owns the target's installed packages: reading their list, and the stand-ins that make pip keep them."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

from wheels.failure import WheelhouseError

# `pip freeze` writes the first form, or the second for a package from a file; `pip list` the third, below a heading.
_FREEZE = re.compile(r"^([A-Za-z0-9][\w.-]*)\s*===?\s*([^\s;#]+)")
_FROM_FILE = re.compile(r"^([A-Za-z0-9][\w.-]*)\s*@\s*\S*?/[^/\s]+?-(\d[^-/\s]*)-\S*\.whl")
_LIST = re.compile(r"^([A-Za-z0-9][\w.-]*)\s+(\d\S*)(?:\s+\S.*)?$")
_SKIPPED = re.compile(r"^(#|-|Package\s+Version|\[notice\]|WARNING)")


def canonical(name: str) -> str:
    """Return a package's name in the form that registries compare."""
    return re.sub(r"[-_.]+", "-", name).lower()


def may_be_replaced(name: str) -> bool:
    """Return whether a wheelhouse may replace a package of the target: not torch and the packages that it loads."""
    return name not in ("torch", "triton") and not name.startswith("nvidia-")


def read_inventory(path: Path) -> dict[str, str]:
    """Read the versions of the packages in the output of `pip freeze` or `pip list`, by canonical name."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise WheelhouseError(f"--have {path} cannot be read: {error}. Give the output of `pip freeze`.") from error
    packages: dict[str, str] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or _SKIPPED.match(line):
            continue
        found = _FREEZE.match(line) or _FROM_FILE.match(line) or _LIST.match(line)
        if found is None:
            raise WheelhouseError(
                f"--have {path}, line {number}: no name and version in {line!r}. Lines are NAME==VERSION as of "
                "`pip freeze`, or NAME VERSION as of `pip list`; write it so, or take the line out."
            )
        packages[canonical(found[1])] = found[2]
    if not packages:
        raise WheelhouseError(f"--have {path} names no package. On the target: python -m pip freeze --all > have.txt")
    return packages


def write_stand_in(directory: Path, name: str, version: str) -> Path:
    """Make a wheel without content or requirements: for pip it is the package that the target has."""
    stem = f"{name.replace('-', '_')}-{version}"
    path = directory / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(
            f"{stem}.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: wheelhouse\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
    return path
