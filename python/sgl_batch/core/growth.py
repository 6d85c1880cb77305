"""Decides at a boundary which reservations are extended, and which sequences wait for that, if a sequence may reserve
less than its whole need.

Theory. Let w_i be what admitted sequence i has reserved and W_i >= w_i its whole need, at most all pages D of this
account. Let G be the largest gap W_i - w_i. Admission and every extension keep

    sum of all w_i + G <= D

and no sequence is ever stuck, though no KV is computed twice:

- No sequence uses more than it has reserved, except one at a time, the borrower: it goes on beyond its reservation to
  its end, in the G pages that no sequence has reserved. A sequence whose reservation cannot be extended is stalled: it
  waits with the pages that it has.
- A stalled sequence may leave the account with all its KV, for an overflow file (kv_offload/overflow_store). It comes
  back as if it were admitted, and before any sequence is. The file's size is no term of the inequality: where it
  cannot grow, sequences stay stalled, which costs time but blocks nothing.
- When the borrower has ended, its pages come free, and the stalled sequence that arrived first borrows. Nothing is
  admitted while a sequence is stalled or away. So every sequence ends, in the worst case one after the other; one that
  is away fits at the latest when no other is left.

Giving pages back keeps the inequality, because no term on its left grows. An extension by n pages adds n to the sum and
takes at most n from G, so that a part of several extensions fits where all of them do.

Each of several ranks has an account of its own, and keeps its inequality by itself; so no rank waits for another. A
sequence that moves is to its new rank like one that is admitted: it fits there with the pages to the next boundary and
with the gap to its whole need, and goes to no rank where a sequence is stalled or away. One that is away does not move.
Where it comes from, its pages come free, as at its end. The control rank decides about prompts and moves from the sums
of each account (rank_agreement); each rank extends, suspends and brings back its own sequences.

Running sequences are extended first, those with the least output before others, so that the most decoded are suspended
if pages lack (BatchGen 5.2). Waiting sequences get what is left when they are to run. If any sequence cannot be
extended and none borrows, the one that arrived first does. How much each needs follows from `residency.pages_to_run`.
"""

from __future__ import annotations

from collections.abc import Iterable

from sgl_batch.core.actions import Action, Actions, Grow, Suspend
from sgl_batch.core.kv_state import KVState
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.plan import Plan
from sgl_batch.core.residency import pages_to_run
from sgl_batch.core.sequence import SequenceState


class GrowthTrial:
    """Extends reservations in a copy of the account, and notes which; `grow` says it as an action.

    `request_slots`: how many sequences that are away may come back. `lacking`: sequences that could not be extended.
    `back`: those that were away and fit again, with the pages that they reserve.
    """

    def __init__(self, ledger: PageLedger, plan: Plan, *, request_slots: int = 0) -> None:
        self._ledger, self._plan = ledger.copy(), plan
        self._borrower = ledger.borrower  # before the trial
        self._grown: dict[str, tuple[SequenceState, int]] = {}
        self._lent: SequenceState | None = None
        self.lacking: list[SequenceState] = []
        self.back: list[tuple[SequenceState, int]] = []
        self._request_slots = request_slots
        self._blocked = request_slots <= 0

    def may_run(self, sequence: SequenceState) -> bool:
        """Return whether a sequence can run to the next boundary, with a reservation extended for that if need be."""
        name, ledger = sequence.sequence_id, self._ledger
        if not ledger.holds(name):
            return self._may_come_back(sequence)
        shared = ledger.whole_pages(sequence) - ledger.whole_need(name)
        pages = pages_to_run(sequence, ledger, self._plan) - shared
        if pages <= ledger.held(name):
            if name in ledger.stalled:
                self._grown[name] = sequence, ledger.held(name)
            return True
        if ledger.can_resize(name, pages):
            ledger.resize(name, pages)
            self._grown[name] = sequence, pages
            return True
        if name == ledger.borrower:
            return True
        self.lacking.append(sequence)
        return False

    def _may_come_back(self, sequence: SequenceState) -> bool:
        """Whether a sequence that is away has room, if all before it have."""
        pages, whole = pages_to_run(sequence, self._ledger, self._plan), self._ledger.whole_pages(sequence)
        if self._blocked or not self._ledger.fits(pages, gap=whole - pages):
            self._blocked = True
            return False
        self._ledger.reserve(sequence.sequence_id, pages, whole=whole)
        self.back.append((sequence, pages))
        self._blocked = len(self.back) >= self._request_slots
        return True

    def lend(self) -> SequenceState | None:
        """Let the first of those that lack pages by arrival borrow, unless a stalled one came before or one borrows.

        Returns the borrower, which lacks pages no longer.
        """
        if self._ledger.borrower is not None or not self.lacking:
            return None
        first = min(self.lacking, key=lambda sequence: sequence.arrival)
        others = (arrival for name, arrival in self._ledger.stalled.items() if name != first.sequence_id)
        if first.arrival > min(others, default=first.arrival):
            return None
        self.lacking.remove(first)
        self._ledger.lend(first.sequence_id)
        self._lent = first
        return first

    def grow(self, of: Iterable[SequenceState] | None = None) -> tuple[Action, ...]:
        """Return what has changed as an action, if anything has; `of`: only with the extensions of these sequences.

        A loan comes with the extension of who borrowed before, which made it possible.
        """
        names = list(self._grown) if of is None else [sequence.sequence_id for sequence in of]
        if self._lent is not None and self._borrower is not None and self._borrower not in names:
            names.append(self._borrower)
        pages = tuple(self._grown[name] for name in names if name in self._grown)
        stalled = tuple(one for one in self.lacking if one.sequence_id not in self._ledger.stalled)
        if not (pages or stalled or self._lent):
            return ()
        return (Grow(pages=pages, stalled=stalled, borrower=self._lent),)


def extend_running(kv: KVState, plan: Plan) -> Actions:
    """Return the actions that extend the running sequences for the coming interval, and suspend those without pages.

    Nothing once they have been carried out, and nothing if the account reserves all that a sequence can need.
    """
    if not kv.admission.policy.grows:
        return ()
    trial = GrowthTrial(kv.admission, plan)
    for sequence in sorted(kv.runners(), key=lambda one: (one.generated_tokens, one.arrival)):
        trial.may_run(sequence)
    trial.lend()
    suspend = Suspend(sequences=tuple(trial.lacking), why="it has outgrown the pages that it has reserved")
    return (*trial.grow(), *([suspend] if trial.lacking else []))


def extend_waiting(
    waiting: Iterable[SequenceState], ledger: PageLedger, plan: Plan, *, most: int, request_slots: int = 0
) -> tuple[GrowthTrial, list[SequenceState]]:
    """Return up to `most` waiting sequences, in their order, that may run, and the extensions that this takes.

    Those that cannot be extended are passed: each borrows in its turn. One that is away passes no other that is.
    `request_slots`: how many of those may come back.
    """
    trial, found = GrowthTrial(ledger, plan, request_slots=request_slots), list[SequenceState]()
    for sequence in waiting:
        if len(found) >= most:
            break
        if trial.may_run(sequence):
            found.append(sequence)
    borrower = trial.lend() if len(found) < most or not found else None
    if borrower is not None and len(found) < most:
        found.append(borrower)
    return trial, found


def carry_out(action: Grow, ledger: PageLedger) -> None:
    """Write into the account which reservations grow, which sequences wait for that, and which one borrows."""
    for sequence, pages in action.pages:
        ledger.resize(sequence.sequence_id, pages)
    for sequence in action.stalled:
        ledger.stall(sequence.sequence_id, sequence.arrival)
    if action.borrower is not None:
        ledger.lend(action.borrower.sequence_id)
