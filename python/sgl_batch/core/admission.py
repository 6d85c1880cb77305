"""Decides which queued sequences form the next prefill group (BatchGen Algorithm 2, SELECTBATCH).

Admission is the promise that an admitted sequence can run to its end: its pages are reserved for all tokens that it
can ever have. Functions here only choose; `reserve` writes the choice into the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sgl_batch.core.admission_policy import AdmissionPolicy
from sgl_batch.core.page_ledger import PageLedger, pages_for
from sgl_batch.core.plan import Plan
from sgl_batch.core.residency import pages_to_run
from sgl_batch.core.sequence import SequenceState
from sgl_batch.core.sequence_queue import of_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """One unit of prefill work: a sequence alone, or the leader of a prompt group with other choices of the group.

    The leader computes the prompt; the followers begin from its KV.
    """

    leader: SequenceState
    followers: tuple[SequenceState, ...] = ()

    @property
    def members(self) -> tuple[SequenceState, ...]:
        """The leader and its followers."""
        return (self.leader, *self.followers)


def refusal(
    sequence: SequenceState,
    ledger: PageLedger,
    store: PageLedger | None = None,
    *,
    most_prompt_tokens: int | None = None,
) -> str | None:
    """Return why a sequence can never fit, with the numbers, or None if it can.

    The reason becomes the error of that sequence's own line; no other line is affected.

    Args:
        sequence: the sequence that has arrived.
        ledger: the account of device pages.
        store: the account of the host KV store's pages; None without a store.
        most_prompt_tokens: the longest prompt, in tokens, for which the device's budget has working memory; None
            without a budget.
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
    elif store is not None and need > store.most_pages:
        where, remedy = f"the host KV store holds {store.most_pages}", "--kv-store-bytes"
    else:
        return None
    return (
        f"the prompt has {sequence.prompt_tokens} tokens and up to {sequence.max_new_tokens} are to be generated: "
        f"{need} pages of {page} tokens, but {where}; lower max_tokens, shorten the prompt, or raise {remedy}"
    )


def group_by_prompt(queued: Sequence[SequenceState], *, most_members: int) -> Iterator[Admission]:
    """Yield the queue as units, in its order; the choices of one request form one unit, at the first of them.

    A choice whose leader is not queued is a unit of its own and computes its prompt itself.

    Args:
        queued: queued sequences in the order of the policy. It is read only as far as the caller reads units.
        most_members: the most sequences of a unit. Choices beyond it stay queued, and later compute their prompt
            themselves.
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


def first_pages(sequence: SequenceState, ledger: PageLedger, plan: Plan | None) -> int:
    """Return the pages that a sequence reserves when it is admitted, shared ones among them.

    All that it can need, or, by a policy that grows, those for its expected output and at least those with which it
    runs to the next boundary. `plan`: the plan in force, which only such a policy needs.
    """
    whole = ledger.whole_pages(sequence)
    if not ledger.policy.grows:
        return whole
    assert plan is not None, f"{ledger.policy.name} reserves by the plan's interval"
    expected = pages_for(sequence.prompt_tokens + sequence.expected_tokens, ledger.page_size)
    return min(whole, max(expected, pages_to_run(sequence, ledger, plan)))


def arriving_pages(sequence: SequenceState, ledger: PageLedger, plan: Plan) -> int:
    """Return the pages that a sequence with KV reserves in the account of a rank to which it moves.

    All that it can need, or, by a policy that grows, those with which it runs to the next boundary.
    """
    return pages_to_run(sequence, ledger, plan) if ledger.policy.grows else ledger.whole_pages(sequence)


def unit_pages(unit: Admission, ledger: PageLedger, plan: Plan | None = None) -> int:
    """Return the pages that a unit reserves: the leader's without those that it shares, and each follower's own."""
    return sum(member_pages(unit, ledger, plan))


def member_pages(unit: Admission, ledger: PageLedger, plan: Plan | None = None) -> list[int]:
    """Return the pages that each member of a unit reserves for itself, the leader first."""
    leader = first_pages(unit.leader, ledger, plan) - unit.leader.shared_tokens // ledger.page_size
    shared = ledger.pages_shared_by_choices(unit.leader)
    return [leader, *(first_pages(follower, ledger, plan) - shared for follower in unit.followers)]


def largest_gap(unit: Admission, ledger: PageLedger, plan: Plan | None) -> int:
    """Return the most pages that a member of a unit can need beyond what it reserves."""
    if not ledger.policy.grows:
        return 0
    return max(ledger.whole_pages(member) - first_pages(member, ledger, plan) for member in unit.members)


def select_prefill_group(
    units: Iterable[Admission],
    ledger: PageLedger,
    *,
    b_moe: int,
    free_request_slots: int,
    taken: int = 0,
    plan: Plan | None = None,
) -> list[Admission]:
    """Take units from the head of the queue while the tokens to compute fit `b_moe` and pages and slots suffice.

    A unit that does not fit now blocks the units behind it, so that no sequence starves. A prompt longer than `b_moe`
    forms a group of its own. A unit that is too large even for an empty device is taken without its followers, which
    then queue as units of their own and come next. Nothing is taken while an admitted sequence waits for pages of the
    account, because it comes first, nor while the account's lease admits none.

    Args:
        units: candidates in the order of the queue; read one past the last that is taken. The call notes in their
            members how much output the admission policy expects.
        ledger: the account of admission. It is not changed; the caller calls `reserve` for each unit it prefills.
        b_moe: the most tokens that the group computes.
        free_request_slots: how many more sequences the device can hold.
        taken: tokens that the group has to compute already.
        plan: the plan in force, for a policy that grows.

    Returns:
        The chosen units, a prefix of `units`.
    """
    chosen: list[Admission] = []
    tokens, slots = taken, free_request_slots
    need = largest = gap = 0
    if ledger.has_waiting or not ledger.admits:
        return []
    for whole in units:
        note_expected(whole, ledger.policy)
        unit, pages, unit_gap = whole, member_pages(whole, ledger, plan), largest_gap(whole, ledger, plan)
        cut = sum(pages) > ledger.most(max(pages), unit_gap)
        if cut:
            unit = Admission(leader=whole.leader)
            pages, unit_gap = member_pages(unit, ledger, plan), largest_gap(unit, ledger, plan)
        rows = unit.leader.prefill_rows
        need, largest, gap = need + sum(pages), max(largest, *pages), max(gap, unit_gap)
        full = tokens and tokens + rows > b_moe
        if full or not ledger.has_room(need, largest=largest, gap=gap) or len(unit.members) > slots:
            break
        chosen.append(unit)
        tokens += rows
        slots -= len(unit.members)
        if cut:
            break
    return chosen


def note_expected(unit: Admission, policy: AdmissionPolicy) -> None:
    """Note in a unit's members how much output is expected, which a record of the decision shows."""
    if policy.grows:
        expected = policy.expected_tokens(unit.leader)
        for member in unit.members:
            member.expected_tokens = expected


def reserve(unit: Admission, ledger: PageLedger, *, held: int, new: int, plan: Plan | None = None) -> None:
    """Write the pages of a unit that is about to be prefilled into the ledger.

    Args:
        unit: the unit.
        ledger: the account of admission, where the pages fit.
        held: shareable pages of the leader's prompt, which count as prompt pages and belong to no single sequence.
            Followers hold those of them that they can share as well.
        new: how many of `held` no earlier prompt has reserved.
        plan: the plan in force, for a policy that grows.
    """
    ledger.add_prompt_pages(new)
    shared = [held, *(ledger.pages_shared_by_choices(follower) for follower in unit.followers)]
    for member, not_its_own in zip(unit.members, shared, strict=True):
        first, whole = first_pages(member, ledger, plan), ledger.whole_pages(member)
        ledger.reserve(member.sequence_id, first - not_its_own, whole=whole - not_its_own)
