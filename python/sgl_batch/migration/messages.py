"""Owns the messages of a migration. `protocol` decides when each is sent."""

from __future__ import annotations

import msgspec

from sgl_batch.migration.header import SequenceHeader


class MigrationBatchId(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Names a batch: the sequences that move together from rank `source` to rank `target` at one boundary."""

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
    """Receiver to sender: there is room for none of them, for the reason given for each sequence."""

    refused: dict[str, str]


class Stored(_Message, frozen=True, tag="stored"):
    """Receiver to sender: all KV has arrived in its pages."""


class Commit(_Message, frozen=True, tag="commit"):
    """Sender to receiver: you own the sequences once you receive this."""


class Committed(_Message, frozen=True, tag="committed"):
    """Receiver to sender: I own the sequences; free your pages."""


class Abort(_Message, frozen=True, tag="abort"):
    """Either side: I gave this batch up, before Commit if I am the sender, before Stored if I am the receiver."""

    reason: str


Message = Offer | Accept | Refuse | Stored | Commit | Committed | Abort
