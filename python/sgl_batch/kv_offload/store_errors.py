"""Owns the errors of the host KV store and its copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sgl_batch.errors import SglBatchError, StoreError


class StoreFault(SglBatchError):  # noqa: N818 (the caller's fault, not the store's error)
    """The caller broke the store's rules, by freeing a block twice for example. Nothing has changed."""


class CopyError(StoreError):
    """A copy has failed; the message says what, where and why. Its targets are undefined.

    `errno` is the system's error number; None if there is none (a file that ends early, a wrong checksum).
    """

    def __init__(self, message: str, *, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class CopyCancelled(SglBatchError):  # noqa: N818 (a name that says which error it is)
    """A copy was cancelled before it was complete. Its targets are undefined."""


@contextmanager
def faults() -> Iterator[None]:
    """Inside, turn the native library's value errors into StoreFault."""
    try:
        yield
    except ValueError as error:
        raise StoreFault(str(error)) from error
