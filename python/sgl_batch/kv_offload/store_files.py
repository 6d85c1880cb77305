"""Owns the files behind a host KV store: a table in shared memory, and data in memory or on a disk; not their content.

The files have no name: they are freed when the last process that has them open ends, in whatever way. Other processes
of the machine open them through the descriptors of a process that has them open.
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
    """Open descriptors. `data` is None if the store is in memory of this process alone.

    `name`: the path at which a file on a disk was created, for messages; otherwise empty.
    """

    table: int
    data: int | None
    name: str = ""

    @classmethod
    def create(cls, num_bytes: int, *, directory: Path | None, shared: bool) -> StoreFiles:
        """Create a store's files in `directory`, or in memory. Raises ConfigError if there is no room for them."""
        name, data = "", None
        if directory is not None:
            data, name = _on_disk(directory, num_bytes)
        elif shared:
            data = _in_memory("sgl-batch-kv-store", num_bytes)
        return cls(table=_in_memory("sgl-batch-kv-slots", None), data=data, name=name)

    @classmethod
    def open(cls, table_path: str, data_path: str, name: str) -> StoreFiles:
        """Open the files of another process. Raises OSError if they are gone, or cannot be opened."""
        table = os.open(table_path, os.O_RDWR | os.O_CLOEXEC)
        try:
            data = os.open(data_path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            os.close(table)
            raise
        return cls(table=table, data=data, name=name)

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self.table)
        if self.data is not None:
            os.close(self.data)


def path_for_others(descriptor: int) -> str:
    """Return the path at which other processes of this machine and user can open a descriptor while it is open."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _in_memory(name: str, num_bytes: int | None) -> int:
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if num_bytes is not None:
        os.ftruncate(descriptor, num_bytes)
        # Sealed: a process that touches mapped memory beyond the end of a shrunk file is killed.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return descriptor


def _on_disk(directory: Path, num_bytes: int) -> tuple[int, str]:
    """Create a sparse file of that size; return its descriptor, and its name for messages."""
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
