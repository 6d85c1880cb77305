"""Owns temporary directories that belong to a process, and the removal of those whose process has ended.

A file `owner-PID` in the directory is locked while the process lives; the kernel releases the lock when the process
ends, for any reason. Only the lock counts: process ids are reused, and mean nothing in another container.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_OWNER = "owner-"
_REGISTERED = "outside"  # the name of the file that lists registered shared memory
_SHARED_MEMORY = Path("/dev/shm")


class OwnerLock:
    """The locked file of an owner. Pickled for a child process it holds nothing, because descriptors stay behind."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[type[OwnerLock], tuple[()]]:
        return OwnerLock, ()

    def release(self) -> None:
        """Close the file. A second call closes nothing: the descriptor's number may be another file's by then."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedDirectory:
    """A directory of this process. A child process that gets this object may use the path, and owns nothing."""

    path: Path
    lock: OwnerLock

    @classmethod
    def make(cls, prefix: str, parent: Path | None = None, purpose: str = "") -> OwnedDirectory:
        """Make a directory in `parent` (default: the folder of temporary files).

        `purpose`: a text that other processes can read (`remove_abandoned`).
        """
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        # The file gets its name after it is locked: a named file without a lock has no owner any more.
        draft = path / "draft"
        lock = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.write(lock, purpose.encode())
        fcntl.lockf(lock, fcntl.LOCK_EX)
        draft.rename(path / f"{_OWNER}{os.getpid()}")
        return cls(path=path, lock=OwnerLock(lock))

    def remove(self) -> None:
        """Remove the directory and its registered shared memory, as far as possible. Idempotent."""
        remove_tree(self.path)
        with suppress(OSError):
            self.lock.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class LivingDirectory:
    """A directory whose process lives."""

    path: Path
    pid: int
    purpose: str


def remove_abandoned(prefix: str, parent: Path | None = None) -> list[LivingDirectory]:
    """Remove the directories of ended processes, and return those of other processes that live.

    Other processes may make and remove directories meanwhile.
    """
    parent, living = parent or Path(tempfile.gettempdir()), []
    directories = [one for one in _listed(parent) if one.name.startswith(prefix)]
    for owner in (one for directory in directories for one in _listed(directory) if one.name.startswith(_OWNER)):
        number = owner.name.removeprefix(_OWNER)
        # Opening and closing a locked file of this process would release the lock.
        if not number.isdigit() or int(number) == os.getpid():
            continue
        with suppress(OSError), owner.open("r+b") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                living.append(
                    LivingDirectory(path=owner.parent, pid=int(number), purpose=file.read().decode(errors="replace"))
                )
            else:
                remove_tree(owner.parent)
    return living


def register_shared_memory(directory: Path, file: Path) -> None:
    """Register a file in shared memory, which is removed with `directory`; files elsewhere are ignored."""
    with (directory / _REGISTERED).open("a") as registered:
        registered.write(f"{file}\n")


def remove_tree(directory: Path) -> None:
    """Remove a directory and its registered shared memory, as far as possible."""
    for path in _registered(directory):
        with suppress(OSError):
            path.unlink()
    shutil.rmtree(directory, ignore_errors=True)


def _listed(directory: Path) -> list[Path]:
    """Return what is in a directory; nothing where it is none, or was removed."""
    try:
        return [directory / name for name in os.listdir(directory)]
    except OSError:
        return []


def _registered(directory: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(directory):
        if _REGISTERED not in names:
            continue
        with suppress(OSError):
            for line in Path(folder, _REGISTERED).read_text().splitlines():
                if Path(line).parent == _SHARED_MEMORY:
                    yield Path(line)
