"""Owns where the KV of simulated sequences lies: for each form of KV its accounts, and what of it is copied.

They do with numbers what kv_offload/ does with pages; decisions read the same accounts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sgl_batch.core.admission import Admission, reserve
from sgl_batch.core.admission_policy import RESERVE, AdmissionPolicy
from sgl_batch.core.kv_policy import DeviceOnly, KVPolicy, Overflowing
from sgl_batch.core.page_ledger import PageLedger, pages_for
from sgl_batch.core.plan import Plan
from sgl_batch.core.replay import POLICIES
from sgl_batch.core.residency import pages_to_run
from sgl_batch.core.sequence import SequenceState
from sgl_batch.core.store_policies import Exclusive, Inclusive, Streamed
from sgl_batch.errors import ConfigError
from sgl_batch.planner.candidate import STREAMED

# Pages of the file to which stalled sequences move where there is no store: it grows as it must.
FILE_PAGES = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPages:
    """Pages of KV that a rank has: on its device, and in the store or, without one, in its overflow file."""

    device: int
    store: int = 0


class KVForm(Protocol):
    """Where a rank's KV lies. Returned tokens are those whose KV is copied between the device and the store.

    device, admission, streams, store_free: as in `core.kv_state.KVState`.
    policy: what decides where KV lies.
    loses: whether a sequence that gives way loses its KV, and is queued again.
    waits_last: whether it is then queued behind all others, or before them.
    """

    device: PageLedger
    admission: PageLedger
    policy: KVPolicy
    streams: bool
    loses: bool
    waits_last: bool

    @property
    def store_free(self) -> int:
        """Return the blocks of an exclusive store that are free."""

    def admit(self, unit: Admission, plan: Plan, pages: int | None) -> None:
        """Reserve the pages of a unit that is prefilled. `pages`: those that it keeps on the device."""

    def prefilled(self, sequence: SequenceState) -> None:
        """Note where the KV of a prompt lies now. What leaves for the store meanwhile is in the cost of the pass."""

    def leave(self, sequences: Sequence[SequenceState]) -> int:
        """Take sequences off the device, as far as there is room for them; return the tokens copied meanwhile."""

    def restore(self, sequence: SequenceState, pages: int) -> int:
        """Begin to bring a sequence back to so many pages; return the tokens to copy."""

    def arrive(self, sequence: SequenceState) -> None:
        """Note that the KV of a sequence has come back."""

    def join(self, sequence: SequenceState) -> None:
        """Prepare a waiting sequence to run, whose KV lies where decode steps read it."""

    def release(self, sequence: SequenceState) -> None:
        """Free all that a sequence holds."""

    def take_in(self, sequence: SequenceState, pages: int, gap: int) -> None:
        """Reserve for a sequence that another rank has sent with its KV, as `room` says."""

    def stream(self, *, on: bool) -> None:
        """Switch streaming of decode KV on or off. No sequence runs at that time."""

    def tokens_in_memory(self, waiting: int, running: int) -> int:
        """Return the tokens of KV in all tiers, each copy counted, of so many of waiting and of running sequences."""

    def room(self, sequence: SequenceState, plan: Plan) -> tuple[int, int]:
        """Return the pages that a sequence reserves on a rank to which it moves, and by how many it can exceed them."""


def _first_pages(sequence: SequenceState, ledger: PageLedger, plan: Plan) -> tuple[int, int]:
    whole = ledger.whole_pages(sequence)
    pages = min(pages_to_run(sequence, ledger, plan), whole) if ledger.policy.grows else whole
    return pages, whole - pages


class DeviceForm:
    """KV lies on the device alone; where reservations grow, sequences that give way wait in an overflow file."""

    streams = loses = waits_last = False
    store_free = 0

    def __init__(self, memory: RankPages, page_size: int, admission: AdmissionPolicy = RESERVE) -> None:
        self.device = self.admission = PageLedger(memory.device, page_size, policy=admission)
        self.policy: KVPolicy = Overflowing() if admission.grows else DeviceOnly()
        self._file_pages, self._in_file = memory.store, dict[str, int]()

    def admit(self, unit: Admission, plan: Plan, pages: int | None) -> None:
        reserve(unit, self.device, held=0, new=0, plan=plan)

    def prefilled(self, sequence: SequenceState) -> None:
        """It lies on the device."""

    def leave(self, sequences: Sequence[SequenceState]) -> int:
        copied = 0
        for one in sequences:
            pages = pages_for(one.kv_tokens, self.device.page_size)
            if sum(self._in_file.values()) + pages > self._file_pages:
                break
            self._in_file[one.sequence_id] = pages
            self.device.leave(one.sequence_id)
            copied += one.kv_tokens
        return copied

    def restore(self, sequence: SequenceState, pages: int) -> int:
        self.device.reserve(sequence.sequence_id, pages, whole=self.device.whole_pages(sequence))
        return sequence.kv_tokens

    def arrive(self, sequence: SequenceState) -> None:
        self._in_file.pop(sequence.sequence_id)
        self.device.come_back(sequence.sequence_id)

    def join(self, sequence: SequenceState) -> None:
        """Its KV lies where it ran."""

    def stream(self, *, on: bool) -> None:
        raise AssertionError("there is no store to stream from")

    def release(self, sequence: SequenceState) -> None:
        name = sequence.sequence_id
        self.device.away.discard(name)
        self._in_file.pop(name, None)
        if self.device.holds(name):
            self.device.release(name)

    def take_in(self, sequence: SequenceState, pages: int, gap: int) -> None:
        self.device.reserve(sequence.sequence_id, pages, whole=pages + gap)

    def tokens_in_memory(self, waiting: int, running: int) -> int:
        return waiting + running

    def room(self, sequence: SequenceState, plan: Plan) -> tuple[int, int]:
        return _first_pages(sequence, self.device, plan)


class InclusiveForm:
    """Every page is written to the store, where admission reserves; running sequences hold pages of the device too.

    `streams`: whether decode steps read KV from the store, and running sequences hold no pages of the device. Only a
    policy that chooses changes it.
    """

    loses = waits_last = False
    store_free = 0

    def __init__(
        self, memory: RankPages, page_size: int, admission: AdmissionPolicy, policy: KVPolicy, *, streams: bool = False
    ) -> None:
        self.device = PageLedger(memory.device, page_size)
        self.admission = PageLedger(memory.store, page_size, policy=admission)
        self.policy, self.streams = policy, streams

    def admit(self, unit: Admission, plan: Plan, pages: int | None) -> None:
        reserve(unit, self.admission, held=0, new=0, plan=plan)

    def prefilled(self, sequence: SequenceState) -> None:
        """It lies in the store."""

    def leave(self, sequences: Sequence[SequenceState]) -> int:
        for one in sequences:
            self.device.release(one.sequence_id)
        # What is copied is the page that is not full; all others have been.
        return sum(one.kv_tokens % self.device.page_size for one in sequences)

    def restore(self, sequence: SequenceState, pages: int) -> int:
        self.device.reserve(sequence.sequence_id, pages)
        return sequence.kv_tokens

    def arrive(self, sequence: SequenceState) -> None:
        """It holds its pages already."""

    def join(self, sequence: SequenceState) -> None:
        if self.streams:
            self.device.reserve(sequence.sequence_id, 0)

    def stream(self, *, on: bool) -> None:
        self.streams = on

    def release(self, sequence: SequenceState) -> None:
        for ledger in (self.device, self.admission):
            if ledger.holds(sequence.sequence_id):
                ledger.release(sequence.sequence_id)

    def take_in(self, sequence: SequenceState, pages: int, gap: int) -> None:
        self.admission.reserve(sequence.sequence_id, pages, whole=pages + gap)

    def tokens_in_memory(self, waiting: int, running: int) -> int:
        return waiting + running * (1 if self.streams else 2)

    def room(self, sequence: SequenceState, plan: Plan) -> tuple[int, int]:
        return _first_pages(sequence, self.admission, plan)


class ExclusiveForm:
    """A page lies on the device or in the store; all pages of a sequence move together."""

    streams = loses = waits_last = False

    def __init__(self, memory: RankPages, page_size: int, policy: KVPolicy) -> None:
        self.device = PageLedger(memory.device, page_size)
        self.admission = PageLedger(memory.device, page_size, overflow_pages=memory.store)
        self.policy = policy
        self._blocks, self._store_pages = dict[str, int](), memory.store

    @property
    def store_free(self) -> int:
        return self._store_pages - sum(self._blocks.values())

    def admit(self, unit: Admission, plan: Plan, pages: int | None) -> None:
        reserve(unit, self.admission, held=0, new=0, plan=plan)
        if pages is not None:
            self.device.reserve(unit.leader.sequence_id, pages)

    def prefilled(self, sequence: SequenceState) -> None:
        if not self.device.holds(sequence.sequence_id):
            self._to_store([sequence])

    def leave(self, sequences: Sequence[SequenceState]) -> int:
        for one in sequences:
            self.device.release(one.sequence_id)
        return self._to_store(sequences)

    def _to_store(self, sequences: Iterable[SequenceState]) -> int:
        copied = 0
        for one in sequences:
            self._blocks[one.sequence_id] = pages_for(one.kv_tokens, self.device.page_size)
            copied += one.kv_tokens
        assert self.store_free >= 0, "the store holds no more than its blocks"
        return copied

    def restore(self, sequence: SequenceState, pages: int) -> int:
        self.device.reserve(sequence.sequence_id, pages)
        return sequence.kv_tokens

    def arrive(self, sequence: SequenceState) -> None:
        self._blocks.pop(sequence.sequence_id)

    def join(self, sequence: SequenceState) -> None:
        """Its prompt has stayed on the device."""

    def stream(self, *, on: bool) -> None:
        raise AssertionError("only an inclusive store is streamed from")

    def release(self, sequence: SequenceState) -> None:
        name = sequence.sequence_id
        self._blocks.pop(name, None)
        for ledger in (self.device, self.admission):
            if ledger.holds(name):
                ledger.release(name)

    def take_in(self, sequence: SequenceState, pages: int, gap: int) -> None:
        self.admission.reserve(sequence.sequence_id, pages, whole=pages + gap)
        self._to_store([sequence])

    def tokens_in_memory(self, waiting: int, running: int) -> int:
        return waiting + running

    def room(self, sequence: SequenceState, plan: Plan) -> tuple[int, int]:
        return _first_pages(sequence, self.admission, plan)


def make_form(name: str, memory: RankPages, page_size: int, admission: AdmissionPolicy = RESERVE) -> KVForm:
    """Return the KV of a rank by the name of its form. `admission` is the rank's own. Raises ConfigError."""
    if name not in POLICIES:
        raise ConfigError(f"the form of KV is {name!r}; it is one of {', '.join(POLICIES)}")
    match POLICIES[name]():
        case Exclusive() as policy:
            return ExclusiveForm(memory, page_size, policy)
        case (Inclusive() | Streamed()) as policy:
            return InclusiveForm(memory, page_size, admission, policy, streams=name == STREAMED)
    return DeviceForm(memory, page_size, admission)
