"""Decides where prompts go if a page of KV lies on the device or in the store, not in both, and how many sequences that
admits. Who moves from one tier to the other later is decided in `residency`.

A sequence lies in one tier as a whole, but while it is copied. Each admitted sequence i can need w_i pages, at most all
of the device's. Let D and S be the pages of the device and of the store. Admission keeps (PageLedger.fits)

    sum of all w_i <= D + max(0, S - M)        M: the largest w_i

and nobody is ever stuck then. Pages of the device lack only where those on it, X, want more than D together; each wants
no more than its w_i, so that the w_i of X are more than D, and those of all others less than S - M. What these have in
the store is no more than that: more than M slots are free, enough for anyone of X to leave. The same holds, with a
smaller X, for the next that has to leave, until the others have room. (Where M > S, all w_i fit the device together,
and pages never lack.) Slots of a sequence on its way back are free when its copy has ended: whoever needs them waits
for that, which depends on nobody.

Whoever waits in the store comes back in its turn, in the end when nobody runs: alone, any sequence fits the device. Its
turn comes, because prompts may stay on the device only while nobody waits in the store, so that those that wait on the
device always come first; and a queued prompt finds room at last, because nobody passes the head of the queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sgl_batch.core.admission import Admission
from sgl_batch.core.page_ledger import PageLedger, pages_for
from sgl_batch.core.plan import Plan
from sgl_batch.core.residency import pages_to_run


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCapacity:
    """Pages free for prompts in each tier now; `device` is None where somebody waits in the store.

    `to_store`: whether prompts can be computed on their way to the store. Where they cannot, they wait for the device.
    """

    device: int | None
    store: int
    to_store: bool = True


def assign_tier(
    units: Iterable[Admission], capacity: TierCapacity, ledger: PageLedger, plan: Plan
) -> Iterator[Admission]:
    """Units from the head on as far as their prompts have room, all of them in the tier that has it for the first.

    Choices of one prompt begin in the store, each with references to it that count as its own; a prompt too large for
    that comes without its choices, which then queue for themselves, and so does any where prompts cannot be computed on
    their way there. `ledger` is that of admission.
    """
    room = on_device = None
    for whole in units:
        cut = whole.followers and (not capacity.to_store or _slots(whole, ledger) > ledger.overflow_pages)
        unit = Admission(leader=whole.leader) if cut else whole
        if room is None:
            on_device = stays_on_device([unit], capacity, ledger, plan)
            if not (on_device or capacity.to_store):
                return
            room = (capacity.device or 0) if on_device else capacity.store
        if on_device and unit.followers:
            return
        room -= pages_to_run(unit.leader, ledger, plan) if on_device else _slots(unit, ledger)
        if room < 0:
            return
        yield unit
        if cut:
            return


def stays_on_device(units: Iterable[Admission], capacity: TierCapacity, ledger: PageLedger, plan: Plan) -> bool:
    """Whether these prompts are computed in pages of the device, from where each can go on, not on their way out."""
    units = list(units)
    if capacity.device is None or any(unit.followers for unit in units):
        return False
    return sum(pages_to_run(unit.leader, ledger, plan) for unit in units) <= capacity.device


def _slots(unit: Admission, ledger: PageLedger) -> int:
    return len(unit.members) * pages_for(unit.leader.kv_tokens, ledger.page_size)
