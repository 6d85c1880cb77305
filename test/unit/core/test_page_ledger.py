"""The account of pages conserves under any reservations and releases."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from sequence_builders import sequence

from sgl_batch.core.page_ledger import PageLedger, pages_for

# No deadline: a busy machine is no fault of the code.
QUICK = settings(max_examples=200, deadline=None)
OWNERS = st.sampled_from([f"s{i}" for i in range(6)])


class LedgerAgainstAModel(RuleBasedStateMachine):
    """Random operations, including some that must be refused, compared with a plain dictionary."""

    TOTAL = 20

    def __init__(self):
        super().__init__()
        self.ledger = PageLedger(self.TOTAL, 8)
        self.held: dict[str, int] = {}

    @rule(owner=OWNERS, pages=st.integers(0, 12))
    def reserve(self, owner, pages):
        if owner in self.held or pages > self.TOTAL - sum(self.held.values()):
            with pytest.raises(AssertionError, match=owner):
                self.ledger.reserve(owner, pages)
        else:
            self.ledger.reserve(owner, pages)
            self.held[owner] = pages

    @rule(owner=OWNERS)
    def release(self, owner):
        if owner in self.held:
            assert self.ledger.release(owner) == self.held.pop(owner)
        else:
            with pytest.raises(AssertionError, match=f"{owner} holds no reservation"):
                self.ledger.release(owner)

    @invariant()
    def free_and_reserved_make_the_total(self):
        ledger = self.ledger
        assert ledger.free_pages + ledger.reserved_pages == ledger.total_pages == self.TOTAL
        assert ledger.free_pages >= 0
        assert ledger.reserved_pages == sum(self.held.values())
        assert {f"s{i}" for i in range(6) if ledger.holds(f"s{i}")} == set(self.held)


LedgerAgainstAModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestFreeAndReservedMakeTheTotal = LedgerAgainstAModel.TestCase


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (7, 1), (8, 1), (9, 2), (16, 2), (17, 3)])
def test_a_partly_filled_page_counts_whole(tokens, pages):
    assert pages_for(tokens, 8) == pages


@QUICK
@given(prompt=st.integers(1, 300), new=st.integers(0, 300), page_size=st.sampled_from([1, 8, 64]))
def test_shared_and_own_pages_of_a_choice_make_its_whole(prompt, new, page_size):
    ledger, choice = PageLedger(10_000, page_size), sequence(prompt=prompt, new=new)
    whole, shared, own = ledger.whole_pages(choice), ledger.shared_pages(choice), ledger.own_pages(choice)
    assert shared + own == whole
    assert whole * page_size >= choice.total_tokens > (whole - 1) * page_size
    assert shared * page_size < prompt, "the last token of the prompt is each choice's own"
    assert own >= 1, "a choice writes into a page that no other sequence reads"
