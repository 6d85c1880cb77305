"""Temporary directories that belong to a process, and the removal of those whose process was killed.

It decides nothing about what lies in them. A file `owner-PID` in the directory is locked as long as the process lives:
the kernel lifts the lock with the process, however that ends. No other sign is trusted, since numbers of processes are
used again and mean nothing in another container.
"""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_OWNER = "owner-"
_OUTSIDE = "outside"
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedDirectory:
    """A directory of this process. A child process that is given it may use the path, and owns nothing."""

    path: Path
    lock: int  # the descriptor of the locked file, in the owner

    @classmethod
    def make(cls, prefix: str, parent: Path | None = None, purpose: str = "") -> OwnedDirectory:
        """Make one in `parent` (default: where temporary files lie). `purpose` is for others to read."""
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        # It gets its name when it is locked: one that is named and not locked has no owner any more.
        draft = path / "draft"
        lock = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.write(lock, purpose.encode())
        fcntl.lockf(lock, fcntl.LOCK_EX)
        draft.rename(path / f"{_OWNER}{os.getpid()}")
        return cls(path=path, lock=lock)

    def remove(self) -> None:
        """Remove it with all that belongs to it, as far as that is possible."""
        remove_tree(self.path)
        with suppress(OSError):
            os.close(self.lock)


@dataclass(frozen=True, slots=True, kw_only=True)
class Living:
    """A directory whose process lives."""

    path: Path
    pid: int
    purpose: str


def remove_abandoned(prefix: str, parent: Path | None = None) -> list[Living]:
    """Remove the directories of ended processes; returns those of other processes that live."""
    parent, living = parent or Path(tempfile.gettempdir()), []
    for owner in parent.glob(f"{glob.escape(prefix)}*/{_OWNER}*"):
        number = owner.name.removeprefix(_OWNER)
        # To open and close a locked file of this process would lift the lock.
        if not number.isdigit() or int(number) == os.getpid():
            continue
        with suppress(OSError), owner.open("r+b") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                living.append(Living(path=owner.parent, pid=int(number), purpose=file.read().decode(errors="replace")))
            else:
                remove_tree(owner.parent)
    return living


def register_shared_memory(directory: Path, outside: Path) -> None:
    """Have `outside`, in shared memory, removed with `directory`."""
    with (directory / _OUTSIDE).open("a") as file:
        file.write(f"{outside}\n")


def remove_tree(directory: Path) -> None:
    """Remove a directory with what belongs to it, as far as that is possible."""
    for path in _outside(directory):
        with suppress(OSError):
            path.unlink()
    shutil.rmtree(directory, ignore_errors=True)


def _outside(directory: Path) -> Iterator[Path]:
    for notes in directory.rglob(_OUTSIDE):
        with suppress(OSError):
            for line in notes.read_text().splitlines():
                if Path(line).parent == _SHARED_MEMORY:
                    yield Path(line)
