"""Owns the messages of a migration. When each is sent is decided in `protocol`."""

from __future__ import annotations

import msgspec

from sgl_batch.migration.header import SequenceHeader


class MigrationBatchId(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A batch: the sequences that go from one rank to another at one boundary. They are moved together."""

    boundary: int
    source: int
    target: int

    def __str__(self) -> str:
        return f"the batch of boundary {self.boundary} from rank {self.source} to rank {self.target}"


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    batch: MigrationBatchId


class Offer(_Message, frozen=True, tag="offer"):
    """Sender to receiver: these sequences, in the order of the moves that both ranks know."""

    headers: list[SequenceHeader]


class Accept(_Message, frozen=True, tag="accept"):
    """Receiver to sender: pages are reserved for all but those in `refused` (sequence to reason); send their KV."""

    refused: dict[str, str]


class Refuse(_Message, frozen=True, tag="refuse"):
    """Receiver to sender: none has a place here, for the reasons given by sequence."""

    refused: dict[str, str]


class Stored(_Message, frozen=True, tag="stored"):
    """Receiver to sender: all KV has arrived in its pages."""


class Commit(_Message, frozen=True, tag="commit"):
    """Sender to receiver: they are yours from your receipt of this."""


class Committed(_Message, frozen=True, tag="committed"):
    """Receiver to sender: they are mine; free your pages."""


class Abort(_Message, frozen=True, tag="abort"):
    """Either to the other: I gave this batch up, before Stored if I am the receiver and before Commit if the sender."""

    reason: str


Message = Offer | Accept | Refuse | Stored | Commit | Committed | Abort
