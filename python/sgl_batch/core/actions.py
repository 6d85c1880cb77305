"""Owns the actions that `decide` returns and the executor carries out, in the order in which they stand.

A list of actions ends with one that says what the device does next (Prefill, PrefillChoices, Step, Idle), or with one
after which `decide` is asked again. An action names sequences and numbers of pages; it holds no request and no tensor.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from sgl_batch.core.admission import Admission
from sgl_batch.core.sequence import SequenceState

PagesOf = tuple[tuple[SequenceState, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens [start, start + tokens) of a sequence's prompt, which one forward pass computes.

    `start` is a whole number of pages; so is the end, unless it is the prompt's.
    """

    sequence: SequenceState
    start: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """Complete the copies to the store that have ended; all of them, where `wait`."""

    wait: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Combine into the decode group the sequences whose KV has come to the device; `wait`: for all on their way."""

    wait: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspend:
    """Move running sequences to the store, where they wait."""

    sequences: tuple[SequenceState, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict:
    """Move the KV of waiting sequences from the device to the store."""

    sequences: tuple[SequenceState, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extend:
    """Let each sequence hold so many pages of the device from now on."""

    pages: PagesOf


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Begin to copy the KV of waiting sequences to the device, where each holds so many pages. Asynchronous: Join."""

    pages: PagesOf


@dataclass(frozen=True, slots=True, kw_only=True)
class Refill:
    """Combine these waiting sequences into the decode group; their KV lies where the coming steps find it."""

    sequences: tuple[SequenceState, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDecode:
    """Decode with KV that is streamed from the store from now on, or no longer. Nothing runs when this comes."""

    on: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginInterval:
    """The boundary is over; decode steps are counted from here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Prefill these units as one group. `on_device`: pages of the device that each leader keeps, where they stay.

    `rest`: what is left of a prompt that decode steps have begun; it is computed first.
    """

    units: tuple[Admission, ...]
    on_device: tuple[int, ...] | None = None
    rest: Chunk | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChoices:
    """Prefill the last prompt token of up to `most` choices whose leader has computed the rest of their prompt."""

    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Run one decode step of `decode` (None: all of the running group), and these chunks in the same forward pass.

    `on_device`: as in Prefill, of those sequences whose first chunk this is.
    """

    prefill: tuple[Chunk, ...] = ()
    decode: tuple[SequenceState, ...] | None = None
    on_device: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """End these sequences of this rank before their time; `why` is their answer's error, with the numbers."""

    sequences: tuple[SequenceState, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Migrate:
    """Move these sequences, with their KV, from rank `source` to rank `target`, where they are READY.

    It stands in the list of every rank of the group, before all that depends on it: the ranks make their moves at the
    same time. A move may fail; its sequence stays where it is.
    """

    sequences: tuple[SequenceState, ...]
    source: int
    target: int


class Phase(enum.Enum):
    """What the forward passes of a group of ranks are for."""

    PREFILL = "prefill"
    DECODE = "decode"


class ParallelForm(enum.Enum):
    """What each of several ranks has of the experts: all of them, or its share, with exchanges between the ranks."""

    DATA = "data"
    EXPERT = "expert"


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchPhase:
    """Run this phase from here on, in this parallel form (BatchGen 5.2): weights and buffers are laid out for it.

    All ranks do it at the same boundary, with no step in flight.
    """

    phase: Phase
    form: ParallelForm


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Let these sequences belong to all of these ranks from here on, each of which attends a part of their KV.

    For the long tail, when few sequences are left. It stands in the list of each of these ranks.
    """

    sequences: tuple[SequenceState, ...]
    ranks: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """There is nothing to do."""


Action = (
    Sync
    | Join
    | Suspend
    | Evict
    | Extend
    | Restore
    | Refill
    | StreamDecode
    | BeginInterval
    | Prefill
    | PrefillChoices
    | Step
    | Abort
    | Migrate
    | SwitchPhase
    | Partition
    | Idle
)
Actions = tuple[Action, ...]
