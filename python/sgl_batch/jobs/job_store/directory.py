"""Owns the jobs directory: its lock, its layout and the modes of its files."""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from pathlib import Path

from sgl_batch.errors import ConfigError
from sgl_batch.jobs.job_store.ids import is_batch_id, is_file_id
from sgl_batch.jobs.scratch import PRIVATE_MODE, make_private, storage_errors

_FOLDERS = ("files", "segments", "partial", "scratch")


class JobsDirectory:
    """One jobs directory: `files/<id>`, `segments/<job id>`, `jobs.sqlite`, and `partial/` and `scratch/`.

    After a crash `partial/` and `scratch/` are worthless.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def acquire(self) -> None:
        """Make the directory if it is missing, and lock it. Raises ConfigError where another process holds it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            for folder in _FOLDERS:
                (self.path / folder).mkdir(exist_ok=True, mode=0o700)
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, PRIVATE_MODE)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise ConfigError(
                f"the jobs directory {self.path} is held by another server; end that one, or give each its own "
                "--jobs-dir"
            ) from error
        self._lock = lock
        try:
            self._tighten()
        except OSError as error:
            self.release()
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> ConfigError:
        return ConfigError(f"the jobs directory {self.path} cannot be used: {error}; name another with --jobs-dir")

    def _tighten(self) -> None:
        """Make files private that an earlier program or a copy left readable for others: prompts and answers.

        SQLite gives the files beside the database the mode of the database.
        """
        make_private(self.database)
        own = [self.path / "lock", *(self.path / f"{self.database.name}{end}" for end in ("-wal", "-shm"))]
        for folder in _FOLDERS:
            (self.path / folder).chmod(0o700)
            own += (self.path / folder).iterdir()
        for path in own:
            _make_private_for_owner(path)

    def release(self) -> None:
        """Let another process hold the directory. Idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def database(self) -> Path:
        """The SQLite file."""
        return self.path / "jobs.sqlite"

    def file(self, file_id: str) -> Path:
        """Return the path of a whole file."""
        assert is_file_id(file_id), f"{file_id!r} is not the id of a file"
        return self.path / "files" / file_id

    def segment(self, job_id: str) -> Path:
        """Return the path of a running job's segment: its result lines in the order of their commits."""
        assert is_batch_id(job_id), f"{job_id!r} is not the id of a job"
        return self.path / "segments" / job_id

    def new_partial(self) -> Path:
        """Return a new path for a file that is not whole yet."""
        return self.path / "partial" / secrets.token_hex(12)

    def new_scratch(self) -> Path:
        """Return a new path for a temporary database."""
        return self.path / "scratch" / secrets.token_hex(12)

    def clear_leftovers(self) -> None:
        """Remove the partial and scratch files of an earlier process."""
        with storage_errors(f"clearing {self.path}"):
            for folder in ("partial", "scratch"):
                for path in (self.path / folder).iterdir():
                    path.unlink()

    def publish(self, partial: Path, file_id: str) -> None:
        """Give a synced file its name, durably. A file of that name from before a crash is replaced."""
        target = self.file(file_id)
        os.replace(partial, target)
        sync_directory(target.parent)


def _make_private_for_owner(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISREG(mode) and stat.S_IMODE(mode) & 0o077:
        path.chmod(PRIVATE_MODE)


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
