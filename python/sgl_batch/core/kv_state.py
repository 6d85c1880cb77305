"""Owns the view of where a rank's KV lies, from which decisions are made; decides nothing.

The scheduler gives it over requests, a simulator over numbers. Sequences come in the order of their turn: a decision
reads as many of them as it takes, never all that wait.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.resident_prompts import ResidentPrompts
from sgl_batch.core.sequence import SequenceState


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """What was measured since a boundary: `rows` tokens decoded in `seconds`. `number` counts intervals from 0.

    `alive`: sequences that ran or waited with KV when it began.
    """

    number: int = 0
    alive: int = 0
    rows: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVState:
    """Where the KV of a rank's sequences lies.

    `device` is the account of pages of the device, `admission` that of all that admitted sequences can need; they are
    one where KV lies on the device alone. `runners` gives the running sequences, with their tokens up to date, and
    `estimate_shared` notes of sequences that are to be prefilled in this order what their prompts share.
    `prompts`: pages of prompts on the device that several sequences may hold, `pages_of` those of a sequence's prompt.
    `choices`: waiting sequences whose last prompt token is to be computed. `store_free`: pages of an
    exclusive store that this rank can take. `arrived`: whether sequences whose KV was on its way to the device can join
    the decode group now.
    `streams`: whether decode steps find their KV in the store.
    """

    device: PageLedger
    admission: PageLedger
    runners: Callable[[], Sequence[SequenceState]]
    estimate_shared: Callable[[Iterable[SequenceState]], None]
    prompts: ResidentPrompts[Any] = field(default_factory=ResidentPrompts)
    pages_of: Callable[[str], Sequence[Hashable]] = lambda _: ()
    choices: Sequence[SequenceState] = ()
    store_free: int = 0
    arrived: bool = False
    streams: bool = False
    interval: Interval = Interval()
