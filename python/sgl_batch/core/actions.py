"""Owns the actions that `decide` returns. The executor carries them out in the order of the list.

The last action of a list either says what the device does next (Prefill, PrefillChoices, Step, Idle), or `decide` is
called again after it. An action names sequences and numbers of pages; it holds no request and no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_batch.core.admission import Admission
from sgl_batch.core.sequence import SequenceState

PagesOf = tuple[tuple[SequenceState, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens [start, start + tokens) of a sequence's prompt, which one forward pass computes.

    The chunk begins and ends at the edge of a page; the last chunk ends with the prompt.
    """

    sequence: SequenceState
    start: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """Complete the copies to the store that have ended. `wait`: wait until all copies have ended."""

    wait: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Combine into the decode group the sequences whose KV has arrived on the device.

    `wait`: wait for all sequences whose KV is on its way.
    """

    wait: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspend:
    """Move running sequences to the store, where they wait until they are restored."""

    sequences: tuple[SequenceState, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict:
    """Move the KV of waiting sequences from the device to the store."""

    sequences: tuple[SequenceState, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extend:
    """Let each sequence hold the given number of device pages from now on."""

    pages: PagesOf


@dataclass(frozen=True, slots=True, kw_only=True)
class Grow:
    """Let each of these admitted sequences reserve so many pages of the account of admission from now on.

    stalled: sequences that wait from now on until their reservations can grow.
    borrower: the sequence that goes on to its end without that; None if none begins to borrow.
    """

    pages: PagesOf
    stalled: tuple[SequenceState, ...] = ()
    borrower: SequenceState | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Begin to copy the KV of waiting sequences to the device, where each holds the given number of pages.

    The copies are asynchronous: Join combines the sequences into the decode group when they have ended.
    """

    pages: PagesOf


@dataclass(frozen=True, slots=True, kw_only=True)
class Refill:
    """Combine waiting sequences into the decode group. Their KV already lies where decode steps read it."""

    sequences: tuple[SequenceState, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDecode:
    """Switch streaming of decode KV from the store on or off. No sequence runs at that time."""

    on: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginInterval:
    """End the boundary: decode steps of the next interval are counted from here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Prefill these units as one group.

    `on_device`: with an exclusive store, by unit, the device pages that the leader keeps; None if the prompts go to the
    store.
    `rest`: the rest of a prompt whose first chunks decode steps have computed; it is computed first.
    """

    units: tuple[Admission, ...]
    on_device: tuple[int, ...] | None = None
    rest: Chunk | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChoices:
    """Prefill the last prompt token of up to `most` choices, whose leader has computed the rest of their prompt."""

    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Run one decode step of `decode` (None: of all running sequences), with the chunks `prefill` in the same pass.

    `on_device`: as in Prefill, for the sequences whose first chunk this is.
    """

    prefill: tuple[Chunk, ...] = ()
    decode: tuple[SequenceState, ...] | None = None
    on_device: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Abort these sequences of this rank. `why` is the error of their answers, with the numbers."""

    sequences: tuple[SequenceState, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Migrate:
    """Move these sequences from rank `source` to rank `target`, where they are READY with their KV, or queued without.

    It is in the action list of every rank of the group, before all actions that depend on it, because the ranks move
    sequences at the same time. If a move fails, its sequence stays on `source`.
    """

    sequences: tuple[SequenceState, ...]
    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Let each of these ranks hold all of these sequences, and run the same steps of them (BatchGen 4.2, 5.3).

    It is for the long tail, when few sequences are left. Each sequence runs on one of the ranks, which goes on to own
    it; the others get replicas. The ranks run nothing else. The sequences are in the order of the rows of the decode
    batch. It is in the action list of every rank of the group. If a replica cannot be made, nothing changes.

    In a prefill phase it is of the one prompt that is computed, for its pass alone (core/prompt_partition).
    """

    sequences: tuple[SequenceState, ...]
    ranks: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndPartition:
    """Drop the replicas on these ranks, which are partitioned. Each sequence goes on where it is owned.

    It comes before all other actions of a list, and is in the list of every rank of the group.
    """

    ranks: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Let the running sequences of these ranks keep their places, and decode none of them until the next boundary.

    It is in the action list of every rank of the group. Some other rank decodes.
    """

    ranks: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPhase:
    """Let all ranks prefill queued sequences as far as they fit, instead of decoding. A callback returns it alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """There is nothing to do."""


Action = (
    Sync
    | Join
    | Suspend
    | Evict
    | Extend
    | Grow
    | Restore
    | Refill
    | StreamDecode
    | BeginInterval
    | Prefill
    | PrefillChoices
    | Step
    | Abort
    | Migrate
    | Partition
    | EndPartition
    | Hold
    | PrefillPhase
    | Idle
)
Actions = tuple[Action, ...]
