"""Owns cutting a wheelhouse into folders of limited size, of wheels without files that our engines never load.

The wheelhouse itself keeps the whole wheels, which are known by their hashes.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from wheels.failure import WheelhouseError
from wheels.inventory import canonical
from wheels.trimming import rewrite_wheel

MIB = 1 << 20
INSTALL = "INSTALL.txt"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMG])i?B?", re.IGNORECASE)
_UNITS = {"K": 1 << 10, "M": MIB, "G": 1 << 30}
# The notes and the folder itself; a part with them stays below the limit.
_NOTES_BYTES = 8192


def _is_static_library(member: str) -> bool:
    return member.endswith(".a")


def _is_multimodal_generation(member: str) -> bool:
    return member.startswith("sglang/multimodal_gen/")


def _is_not_python(member: str) -> bool:
    return member.startswith("flashinfer/") and not member.endswith(".py")


# Which files of a package's wheel are left out. Of flashinfer that is the source of kernels, which it compiles when one
# is first used; its Python alone is what SGLang imports.
LEFT_OUT: dict[str, Callable[[str], bool]] = {
    "flashinfer-python": _is_not_python,
    "sglang": _is_multimodal_generation,
    "xgrammar": _is_static_library,
}


def parse_size(text: str) -> int:
    """Parse a size such as "38M", which is 38 MiB. Raises WheelhouseError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise WheelhouseError(f"--parts is {text!r}; give a number with K, M or G, such as 38M for 38 MiB.")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def trimmed_into(file: Path, folder: Path) -> Path:
    """Copy a file to another folder; a wheel of LEFT_OUT keeps its name and version and loses the files left out."""
    drops = LEFT_OUT.get(canonical(file.name.split("-")[0]))
    if drops is None or file.suffix != ".whl":
        return Path(shutil.copy2(file, folder / file.name))
    return rewrite_wheel(file, folder / file.name, drops)


def packed(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Group names so that no group is over `limit`, the largest first, each into the first group that it fits.

    Raises WheelhouseError for one that is larger by itself.
    """
    groups: list[list[str]] = []
    left: list[int] = []
    for name, num_bytes in sorted(sizes.items(), key=lambda pair: (-pair[1], pair[0])):
        if num_bytes > limit:
            raise WheelhouseError(
                f"{name} is {num_bytes / MIB:.1f} MiB, more than a part has room for ({limit / MIB:.1f} MiB). Raise "
                "--parts, or have the target bring that package itself (--have)."
            )
        place = next((place for place, free in enumerate(left) if num_bytes <= free), len(groups))
        if place == len(groups):
            groups.append([])
            left.append(limit)
        groups[place].append(name)
        left[place] -= num_bytes
    return groups


def split_into_parts(house: Path, names: Sequence[str], source: str | None, limit: int) -> list[Path]:
    """Fill folders part-1, part-2, ... of a wheelhouse, each of at most `limit` bytes; earlier ones are removed.

    `source`: an archive that is built on the target with what the wheels bring; it goes into the last part.
    Raises WheelhouseError.
    """
    for folder in house.glob("part-*"):
        shutil.rmtree(folder)
    whole = house / "part-all"
    whole.mkdir()
    try:
        files = [trimmed_into(house / name, whole) for name in names]
        groups = packed({file.name: file.stat().st_size for file in files}, limit - _NOTES_BYTES)
        if source is not None:
            used = sum((whole / name).stat().st_size for name in groups[-1])
            num_bytes = (house / source).stat().st_size
            packed({source: num_bytes}, limit - _NOTES_BYTES)
            groups = groups if used + num_bytes <= limit - _NOTES_BYTES else [*groups, []]
        parts = [house / f"part-{number}" for number in range(1, len(groups) + 1)]
        for folder, group in zip(parts, groups, strict=True):
            folder.mkdir()
            for name in group:
                (whole / name).replace(folder / name)
            is_last = folder == parts[-1]
            if is_last and source is not None:
                shutil.copy2(house / source, folder)
            _write_notes(folder, len(parts), has_wheels=bool(group), source=source if is_last else None)
    finally:
        shutil.rmtree(whole)
    return parts


def _write_notes(folder: Path, count: int, *, has_wheels: bool, source: str | None) -> None:
    text = (
        f"{folder.name} of {count} of a wheelhouse. Parts may be carried and installed one after another, in order.\n"
        "Their wheels are in versions that were resolved together; some lack files that sgl_batch never loads.\n\n"
    )
    pip = "python -m pip install --no-index --no-deps"
    if has_wheels:
        text += f"    {pip} {folder.name}/*.whl\n"
    if source is not None:
        text += f"    {pip} --no-build-isolation {folder.name}/{source}\n"
    (folder / INSTALL).write_text(text, encoding="utf-8")
