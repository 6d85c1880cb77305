"""Decides which queued sequences make the next prefill group (BatchGen Algorithm 2, SELECTBATCH)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.sequence import SequenceState
from sgl_batch.core.sequence_queue import of_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """One unit of work taken from the queue: a sequence alone, or a leader with its other choices."""

    leader: SequenceState
    followers: tuple[SequenceState, ...] = ()

    @property
    def members(self) -> tuple[SequenceState, ...]:
        return (self.leader, *self.followers)


def refusal(
    sequence: SequenceState,
    ledger: PageLedger,
    store: PageLedger | None = None,
    *,
    most_prompt_tokens: int | None = None,
) -> str | None:
    """Why a sequence can never fit, with the numbers; None if it can (invariant 4: a line's own error).

    `store`: the account of the host KV store, where there is one. `most_prompt_tokens`: where the device has a budget,
    the longest prompt that it has working memory for.
    """
    need, page = ledger.whole_pages(sequence), ledger.page_size
    if most_prompt_tokens is not None and sequence.prompt_tokens > most_prompt_tokens:
        return (
            f"the prompt has {sequence.prompt_tokens} tokens, and the device's budget has working memory for groups of "
            f"{most_prompt_tokens}; shorten the prompt, or raise --b-moe-prefill and with it --device-memory"
        )
    if need > ledger.total_pages:
        where = f"the device holds {ledger.total_pages}"
        remedy = f"--device-memory, or --max-total-tokens to at least {need * page}"
    elif store is not None and need > store.total_pages:
        where, remedy = f"the host KV store holds {store.total_pages}", "--kv-store-bytes"
    else:
        return None
    return (
        f"the prompt has {sequence.prompt_tokens} tokens and up to {sequence.max_new_tokens} are to be generated: "
        f"{need} pages of {page} tokens, but {where}; lower max_tokens, shorten the prompt, or raise {remedy}"
    )


def group_by_prompt(queued: Sequence[SequenceState], *, most_members: int) -> Iterator[Admission]:
    """Units of the queue in its order: the choices of one request go together, leader first.

    A follower whose leader is not queued, or that is past `most_members`, computes its prompt itself.
    """
    led: dict[str, SequenceState | None] = {}
    for sequence in queued:
        group = sequence.prompt_group
        if group is None:
            yield Admission(leader=sequence)
            continue
        if group not in led:
            members = of_prompt(queued, group)
            leader = led[group] = next((s for s in members if s.is_leader), None)
            if leader is not None:
                followers = tuple(s for s in members if s is not leader)
                yield Admission(leader=leader, followers=followers[: most_members - 1])
        if led[group] is None:
            yield Admission(leader=sequence)


def unit_pages(unit: Admission, ledger: PageLedger) -> int:
    """Pages that a unit needs: those of its leader that no prompt before it has, then each follower's own."""
    return sum(member_pages(unit, ledger))


def member_pages(unit: Admission, ledger: PageLedger) -> list[int]:
    """Pages that each member of a unit needs for itself alone, the leader first."""
    leader = ledger.whole_pages(unit.leader) - unit.leader.shared_tokens // ledger.page_size
    return [leader, *(ledger.own_pages(follower) for follower in unit.followers)]


def select_prefill_group(
    units: Iterable[Admission], ledger: PageLedger, *, b_moe: int, free_request_slots: int, taken: int = 0
) -> list[Admission]:
    """Take units from the head while the tokens they compute fit `b_moe` and pages and slots suffice.

    A prompt longer than `b_moe` makes a group of its own. `taken`: tokens that the group has already. A head that does
    not fit now blocks those behind it, so that nobody starves. A unit too large to fit even an empty device is taken
    without its followers, who then queue for themselves, next.
    """
    chosen: list[Admission] = []
    needs: list[int] = []
    tokens, slots = taken, free_request_slots
    for whole in units:
        cut = unit_pages(whole, ledger) > ledger.limit(max(member_pages(whole, ledger)))
        unit = Admission(leader=whole.leader) if cut else whole
        full = tokens and tokens + unit.leader.prefill_rows > b_moe
        needs += member_pages(unit, ledger)
        if full or not ledger.fits(*needs) or len(unit.members) > slots:
            break
        chosen.append(unit)
        tokens += unit.leader.prefill_rows
        slots -= len(unit.members)
        if cut:
            break
    return chosen


def reserve(unit: Admission, ledger: PageLedger, *, held: int, new: int) -> None:
    """Write a unit's pages into the ledger: the leader's prompt has `held` pages that can be shared, `new` of them.

    These are no sequence's own; followers hold those of them that they can share as well.
    """
    ledger.add_prompt_pages(new)
    ledger.reserve(unit.leader.sequence_id, ledger.whole_pages(unit.leader) - held)
    for follower in unit.followers:
        ledger.reserve(follower.sequence_id, ledger.own_pages(follower))
