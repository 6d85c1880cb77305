"""Owns the files behind a host KV store: a table in shared memory, data in memory or on a disk; not what they hold.

None of them has a name that outlives a call: they go with the last process that holds them, however that ends. Other
processes of the machine open them through the descriptors of one that has them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sgl_batch.errors import ConfigError


@dataclass(slots=True, kw_only=True)
class StoreFiles:
    """Open descriptors. `data` is None where the store lies in memory of this process alone; `name` is empty but for a
    file on a disk.
    """

    table: int
    data: int | None
    name: str = ""

    @classmethod
    def create(cls, num_bytes: int, *, directory: Path | None, shared: bool) -> StoreFiles:
        """A store's files: in `directory`, or in memory. Raises ConfigError where there is no room for them."""
        name, data = "", None
        if directory is not None:
            data, name = _on_disk(directory, num_bytes)
        elif shared:
            data = _in_memory("sgl-batch-kv-store", num_bytes)
        return cls(table=_in_memory("sgl-batch-kv-slots", None), data=data, name=name)

    @classmethod
    def open(cls, table_path: str, data_path: str, name: str) -> StoreFiles:
        """The files of another process. Raises OSError where they are not there, or not to be opened."""
        table = os.open(table_path, os.O_RDWR | os.O_CLOEXEC)
        try:
            data = os.open(data_path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            os.close(table)
            raise
        return cls(table=table, data=data, name=name)

    def close(self) -> None:
        """Give the descriptors back."""
        os.close(self.table)
        if self.data is not None:
            os.close(self.data)


def path_for_others(descriptor: int) -> str:
    """Where another process of this machine and user can open what `descriptor` has open, while it has."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _in_memory(name: str, num_bytes: int | None) -> int:
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if num_bytes is not None:
        os.ftruncate(descriptor, num_bytes)
        # A mapping that has lost its memory kills who touches it.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return descriptor


def _on_disk(directory: Path, num_bytes: int) -> tuple[int, str]:
    """A file of that size, which takes room only where it is written, and its name for messages."""
    try:
        space = os.statvfs(directory)
        free = space.f_bavail * space.f_frsize
        if free < num_bytes:
            raise ConfigError(
                f"the host KV store needs {num_bytes} bytes in {directory} (--kv-store-dir), of which {free} are free: "
                "make room there, name another directory, or a smaller store (--kv-store-bytes)"
            )
        descriptor, name = tempfile.mkstemp(prefix="sgl-batch-kv-store-", dir=directory)
        os.unlink(name)
    except OSError as error:
        raise ConfigError(
            f"the host KV store cannot make a file in {directory} ({error}): name another directory (--kv-store-dir)"
        ) from error
    try:
        os.ftruncate(descriptor, num_bytes)
    except OSError as error:
        os.close(descriptor)
        limit = "the limit on the size of files (ulimit -f)" if error.errno == errno.EFBIG else "the file system"
        raise ConfigError(
            f"the host KV store cannot have a file of {num_bytes} bytes in {directory} ({error}): {limit} does not "
            "allow it; lift it, name another directory (--kv-store-dir) or a smaller store (--kv-store-bytes)"
        ) from error
    return descriptor, name
