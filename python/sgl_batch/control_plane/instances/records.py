"""Owns what a server remembers of its instances: a small file in the jobs directory, written before it is relied on."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec

from sgl_batch.control_plane.instances.placement import Place
from sgl_batch.control_plane.instances.service_state import ServiceState
from sgl_batch.errors import ConfigError

FILE_NAME = "instances.json"


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """An instance: its last incarnation, and where that was put; None: nowhere yet."""

    incarnation: int = 0
    place: Place | None = None


class _Contents(msgspec.Struct, kw_only=True):
    service: str
    named: int = 0
    instances: dict[str, Known] = msgspec.field(default_factory=dict)
    state: ServiceState = ServiceState()


class InstanceRecords:
    """The names, incarnations and places of the instances of one service.

    Incarnations only grow, and a name is not given twice, so that what an earlier instance left is never taken for that
    of another. `service` is the identity of the service; it stays when the server is started again.

    Raises:
        ConfigError: The file cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME
        try:
            self._contents = msgspec.json.decode(self._path.read_bytes(), type=_Contents)
        except FileNotFoundError:
            self._contents = _Contents(service=secrets.token_hex(6))
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(
                f"{self._path}, which says what instances there are, cannot be read: {error}. Without it the answers "
                "that they have not given yet are computed again: move it away to go on so"
            ) from error

    @property
    def service(self) -> str:
        """The identity of the service."""
        return self._contents.service

    @property
    def state(self) -> ServiceState:
        """What all engines of the service have in common."""
        return self._contents.state

    def keep_state(self, state: ServiceState) -> None:
        """Write down what all engines of the service are to have in common."""
        self._contents.state = state
        self._write()

    def known(self) -> dict[str, Known]:
        """Return all instances by name."""
        return dict(self._contents.instances)

    def new_name(self) -> str:
        """Return the name of a new instance."""
        self._contents.named += 1
        name = f"i{self._contents.named}"
        self._contents.instances[name] = Known()
        self._write()
        return name

    def next_incarnation(self, name: str, place: Place) -> int:
        """Return the number of the next incarnation of an instance, which is to run at a place."""
        incarnation = self._contents.instances[name].incarnation + 1
        self._contents.instances[name] = Known(incarnation=incarnation, place=place)
        self._write()
        return incarnation

    def forget(self, name: str) -> None:
        """Remove an instance. Its name is not given again."""
        self._contents.instances.pop(name, None)
        self._write()

    def _write(self) -> None:
        draft = self._path.with_name(f".{FILE_NAME}.draft")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(self._contents)))
            file.flush()
            os.fsync(file.fileno())
        draft.rename(self._path)
