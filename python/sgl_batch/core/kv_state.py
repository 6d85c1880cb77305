"""Owns the view of where a rank's KV lies, from which decisions are made.

The scheduler makes it over requests, a simulator over numbers. Sequences are in the order in which their turn comes: a
decision reads as many of them as it takes, never all that wait.
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
    """One interval between boundaries as measured: `rows` tokens were decoded in `seconds`.

    `number` counts intervals from 0. `alive`: sequences that ran or waited with KV when the interval began.
    """

    number: int = 0
    alive: int = 0
    rows: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVState:
    """Where the KV of a rank's sequences lies, at one moment.

    Accounts and callables are live: a KVState is valid until the rank next changes a sequence. Decisions read it and
    change nothing but what `estimate_shared` notes.

    device: the account of device pages.
    admission: the account of all pages that admitted sequences can need. It is `device` itself if KV lies on the device
        alone.
    runners: returns the running sequences, with their token counts up to date. Costs one pass over them.
    estimate_shared: notes in each of the given sequences, which would be prefilled in this order, how many tokens its
        prompt shares (`SequenceState.shared_tokens`).
    prompts: prompt pages on the device that several sequences may hold.
    pages_of: returns the prompt pages of a sequence, by its id, that can be shared.
    choices: waiting sequences whose last prompt token is still to be computed.
    store_free: blocks of an exclusive store, each for one page, that this rank can take now.
    arrived: whether sequences whose KV was on its way to the device can join the decode group now.
    streams: whether decode steps read their KV from the store.
    interval: the last interval between boundaries, as measured.
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
