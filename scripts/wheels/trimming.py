"""Owns removing files from a valid wheel, and which libraries of sglang-kernel's one GPU never loads.

What other wheels lose is decided in wheels/parts.

The wheel has one folder of kernels for Hopper (sgl_kernel/sm90) and one for all others (sgl_kernel/sm100), between
which its loader chooses at import; every other library is for all architectures.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from wheels.failure import WheelhouseError

PACKAGE = "sglang-kernel"
# Libraries that may be left out, and what then does not work.
OPTIONAL_LIBRARIES = {"flash_ops": "FlashAttention 3 (attention backend fa3, SGLang's default on Hopper)"}
_FOLDER = re.compile(r"^sgl_kernel/(sm\d+)/")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Trim:
    """A trim for one compute capability, such as (9, 0), and without some of OPTIONAL_LIBRARIES."""

    capability: tuple[int, int]
    without: tuple[str, ...] = ()

    def folder(self) -> str:
        """The folder of kernels that sglang-kernel's loader uses on this GPU."""
        return "sm90" if self.capability == (9, 0) else "sm100"

    def label(self) -> str:
        """The local version of the trimmed wheel."""
        return ".".join([self.folder(), *(f"no{name.replace('_', '')}" for name in sorted(self.without))])

    def trimmed_version(self, version: str) -> str:
        """Return a local version, which satisfies every requirement that the plain version satisfies."""
        return f"{version}{'.' if '+' in version else '+'}{self.label()}"

    def trimmed_name(self, filename: str) -> str:
        """Return the file name of the trimmed wheel."""
        name, version, *tags = filename.split("-")
        return "-".join([name, self.trimmed_version(version), *tags])

    def drops(self, member: str) -> bool:
        """Return whether the GPU never loads this file of the wheel, or it is left out by name."""
        folder = _FOLDER.match(member)
        if folder is not None:
            return folder[1] != self.folder()
        return any(re.match(rf"^sgl_kernel/{name}\.[^/]*so$", member) for name in self.without)


def trim_wheel(path: Path, trim: Trim) -> Path:
    """Write the trimmed wheel next to `path` and return its path; `path` stays as it is.

    Raises WheelhouseError where the wheel is damaged, or not laid out as this trimming knows it.
    """
    version = path.name.split("-")[1]
    goal = path.with_name(trim.trimmed_name(path.name))
    with opened(path) as source:
        _check_layout(path, source, trim)
    return rewrite_wheel(path, goal, trim.drops, NewVersion(old=version, new=trim.trimmed_version(version)))


@dataclass(frozen=True, slots=True, kw_only=True)
class NewVersion:
    """Return a wheel's version, and its version after trimming."""

    old: str
    new: str


@contextmanager
def opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open the wheel to read it. Raises WheelhouseError if it is damaged."""
    try:
        with zipfile.ZipFile(path) as source:
            yield source
    except (zipfile.BadZipFile, KeyError) as error:
        raise WheelhouseError(f"{path.name} is no whole wheel ({error}). Remove it and run this again.") from error


def rewrite_wheel(path: Path, goal: Path, drops: Callable[[str], bool], version: NewVersion | None = None) -> Path:
    """Write a wheel to `goal` without the files that `drops` accepts, with a RECORD of the rest; return `goal`.

    `version`: where it is to have another one. Raises WheelhouseError where the wheel is damaged.
    """
    name, own = path.name.split("-")[:2]
    old_info = f"{name}-{own}.dist-info"
    new_info = old_info if version is None else f"{name}-{version.new}.dist-info"
    partial = goal.with_name(goal.name + ".partial")
    try:
        with opened(path) as source, zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as sink:
            hashes = _recorded_hashes(source, old_info)
            record = []
            for member in source.infolist():
                if member.is_dir() or drops(member.filename) or member.filename == f"{old_info}/RECORD":
                    continue
                renamed = member.filename.replace(f"{old_info}/", f"{new_info}/", 1)
                changed = version if member.filename == f"{old_info}/METADATA" else None
                digest, num_bytes = _copy(source, member, sink, renamed, changed)
                if hashes.get(member.filename) != digest and changed is None:
                    raise WheelhouseError(
                        f"{path.name}: the hash of {member.filename} is not the one in its RECORD. "
                        "The download is damaged: remove the file and run this again."
                    )
                record.append((renamed, digest, str(num_bytes)))
            _write_record(sink, f"{new_info}/RECORD", record)
        partial.replace(goal)
    finally:
        partial.unlink(missing_ok=True)
    return goal


def _check_layout(path: Path, source: zipfile.ZipFile, trim: Trim) -> None:
    """Check that the wheel has the folders from which its loader chooses, and the libraries to be left out."""
    names = source.namelist()
    folders = sorted({found[1] for name in names if (found := _FOLDER.match(name))})
    if folders != ["sm100", "sm90"]:
        raise WheelhouseError(
            f"{path.name} has the kernel folders {', '.join(folders) or 'none'}; this trimming knows sm90 and sm100. "
            "Leave out --compute-capability to take the whole wheel."
        )
    for library in trim.without:
        if not any(re.match(rf"^sgl_kernel/{library}\.[^/]*so$", name) for name in names):
            raise WheelhouseError(f"{path.name} has no library {library}. Leave out --without {library}.")


def _recorded_hashes(source: zipfile.ZipFile, info: str) -> dict[str, str]:
    rows = csv.reader(io.StringIO(source.read(f"{info}/RECORD").decode("utf-8")))
    return {row[0]: row[1] for row in rows if len(row) == 3}


def _copy(
    source: zipfile.ZipFile, member: zipfile.ZipInfo, sink: zipfile.ZipFile, renamed: str, version: NewVersion | None
) -> tuple[str, int]:
    """Copy one file, METADATA with another version if one is given; return its hash and size."""
    entry = zipfile.ZipInfo(renamed, member.date_time)
    entry.external_attr, entry.compress_type = member.external_attr, zipfile.ZIP_DEFLATED
    digest, num_bytes = hashlib.sha256(), 0
    with source.open(member) as content, sink.open(entry, "w", force_zip64=member.file_size >= 1 << 31) as copy:
        while chunk := content.read(_CHUNK_BYTES if version is None else -1):
            if version is not None:
                chunk = _with_version(chunk, version.old, version.new)
            digest.update(chunk)
            num_bytes += len(chunk)
            copy.write(chunk)
    return "sha256=" + base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode(), num_bytes


def _with_version(metadata: bytes, version: str, trimmed: str) -> bytes:
    """Change the `Version` header of metadata; the description below may also have such a line."""
    header = rb"(?m)^Version: %s\r?$" % re.escape(version.encode())
    changed, count = re.subn(header, b"Version: " + trimmed.encode(), metadata, count=1)
    if count != 1:
        raise WheelhouseError(f"the wheel's METADATA has no line 'Version: {version}'. It cannot be trimmed.")
    return changed


def _write_record(sink: zipfile.ZipFile, name: str, rows: list[tuple[str, str, str]]) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([*rows, (name, "", "")])
    sink.writestr(name, text.getvalue(), zipfile.ZIP_DEFLATED)
