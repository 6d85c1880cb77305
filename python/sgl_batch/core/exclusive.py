"""Decides where prompts go if a KV page lies on the device or in the store, not in both, and how many sequences that
admits. Which sequences move between the tiers later is decided in `residency`.

A sequence lies in one tier as a whole, except while it is copied. Each admitted sequence i can need w_i pages, at most
all of the device's. Let D and S be the pages of the device and of the store, and M the largest w_i. Admission keeps
(PageLedger.fits)

    sum of all w_i <= D + max(0, S - M)

and then no sequence is ever stuck:

- A sequence that has to leave the device finds room in the store. Pages of the device lack only if the sequences on it,
  X, want more than D pages together. Each wants no more than its w_i, so the w_i of X add up to more than D, and those
  of all others to less than S - M. The others hold no more than that in the store, so more than M blocks of the store
  are free: enough for any sequence of X. The same holds, with a smaller X, for the next one that has to leave, until
  the rest have room. (If M > S, all w_i fit the device together, and pages never lack.) Blocks of a sequence on its way
  back are free when its copy has ended. A sequence that needs them waits for that, which depends on no other sequence.
- A sequence that waits in the store comes back in its turn, at the latest when no sequence runs: alone, any sequence
  fits the device. Its turn comes, because prompts may stay on the device only while no sequence waits in the store, so
  that those that wait on the device always come first.
- A queued prompt finds room at last, because no prompt passes the head of the queue.
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
    """Pages that are free for prompts in each tier now.

    device: free pages of the device; None if a sequence waits in the store, because prompts may not stay on the device
        then.
    store: free pages of the store.
    to_store: whether prompts can be computed on their way to the store. If not, they wait for the device.
    """

    device: int | None
    store: int
    to_store: bool = True


def assign_tier(
    units: Iterable[Admission], capacity: TierCapacity, ledger: PageLedger, plan: Plan
) -> Iterator[Admission]:
    """Yield units from the head of the queue while their prompts have room in the tier that the first of them goes to.

    Choices of one prompt begin in the store, where each counts its references to the prompt as its own. If the prompt
    is too large for that, or prompts cannot be computed on their way to the store, the unit comes without its
    followers, which then queue as units of their own. `ledger`: the account of admission.
    """
    room = on_device = None
    for whole in units:
        most_blocks = max(ledger.overflow_pages, ledger.pool_pages)
        cut = whole.followers and (not capacity.to_store or _store_blocks(whole, ledger) > most_blocks)
        unit = Admission(leader=whole.leader) if cut else whole
        if room is None:
            on_device = stays_on_device([unit], capacity, ledger, plan)
            if not (on_device or capacity.to_store):
                return
            room = (capacity.device or 0) if on_device else capacity.store
        if on_device and unit.followers:
            return
        room -= pages_to_run(unit.leader, ledger, plan) if on_device else _store_blocks(unit, ledger)
        if room < 0:
            return
        yield unit
        if cut:
            return


def stays_on_device(units: Iterable[Admission], capacity: TierCapacity, ledger: PageLedger, plan: Plan) -> bool:
    """Return whether these prompts are computed in device pages and stay there, rather than leave for the store."""
    units = list(units)
    if capacity.device is None or any(unit.followers for unit in units):
        return False
    return sum(pages_to_run(unit.leader, ledger, plan) for unit in units) <= capacity.device


def _store_blocks(unit: Admission, ledger: PageLedger) -> int:
    return len(unit.members) * pages_for(unit.leader.kv_tokens, ledger.page_size)
