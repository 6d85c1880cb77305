"""Owns what can go wrong with the host KV store and its copies; decides nothing about what follows from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sgl_batch.errors import SglBatchError, StoreError


class StoreFault(SglBatchError):  # noqa: N818 (the caller's fault, not the store's error)
    """The caller asked for what the rules forbid, such as freeing a block twice; nothing has changed."""


class CopyError(StoreError):
    """A copy has failed: what, where and why. What its targets hold is undefined.

    `errno` is the system's number, None where it gave none (a file that ends early, a checksum that does not match).
    """

    def __init__(self, message: str, *, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class CopyCancelled(SglBatchError):  # noqa: N818 (a name that says which error it is)
    """A copy was cancelled before all of it was made. What its targets hold is undefined."""


@contextmanager
def faults() -> Iterator[None]:
    """What the native library calls a wrong value is the caller's fault."""
    try:
        yield
    except ValueError as error:
        raise StoreFault(str(error)) from error
