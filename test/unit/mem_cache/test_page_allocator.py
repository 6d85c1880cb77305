"""Pages have one owner, tokens lie at their positions, and an allocation that does not fit takes no page."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sgl_batch.mem_cache.page_allocator import PageAllocator

NUM_PAGES = 12


def make(page_size: int, num_pages: int = NUM_PAGES) -> PageAllocator:
    return PageAllocator(num_pages * page_size, page_size, torch.float32, "cpu", None, False)


def extend(allocator: PageAllocator, held: list[list[int]], news: list[int]) -> torch.Tensor | None:
    """Call alloc_extend as SGLang does, for sequences whose tokens are at `held` and which get `news` more."""
    prefixes = torch.tensor([len(kv_indices) for kv_indices in held])
    lengths = prefixes + torch.tensor(news)
    last = torch.tensor([kv_indices[-1] if kv_indices else -1 for kv_indices in held])
    return allocator.alloc_extend(prefixes, prefixes, lengths, lengths, last, sum(news))


def decode(allocator: PageAllocator, held: list[list[int]]) -> torch.Tensor | None:
    """Call alloc_decode as SGLang does, for the next token of each sequence."""
    lengths = torch.tensor([len(kv_indices) + 1 for kv_indices in held])
    return allocator.alloc_decode(lengths, lengths, torch.tensor([kv_indices[-1] for kv_indices in held]))


class AllocatorAgainstSets(RuleBasedStateMachine):
    """Random operations, checked against a model that knows each sequence's KV indices and no free list."""

    @initialize(page_size=st.sampled_from([1, 4, 64]))
    def begin(self, page_size):
        self.page_size = page_size
        self.allocator = make(page_size)
        self.sequences: list[list[int]] = []

    def pages(self, kv_indices: list[int]) -> set[int]:
        return {kv_index // self.page_size for kv_index in kv_indices}

    def num_free(self) -> int:
        return NUM_PAGES - sum(len(self.pages(kv_indices)) for kv_indices in self.sequences)

    def check(self, result: torch.Tensor | None, wanted_pages: int) -> bool:
        """Return whether pages were taken, which must be exactly when enough were free."""
        if wanted_pages > self.num_free():
            assert result is None
            return False
        assert result is not None
        assert result.dtype == torch.int64
        return True

    @rule(data=st.data())
    def extend_some_and_begin_others(self, data):
        size = self.page_size
        old = data.draw(
            st.lists(st.sampled_from(range(len(self.sequences))), unique=True) if self.sequences else st.just([])
        )
        chosen = [self.sequences[i] for i in old] + [[] for _ in range(data.draw(st.integers(0, 2)))]
        assume(chosen)
        news = [data.draw(st.integers(1, 3 * size)) for _ in chosen]
        wanted = sum(
            -(-(len(kv_indices) + new) // size) - -(-len(kv_indices) // size)
            for kv_indices, new in zip(chosen, news, strict=True)
        )
        result = extend(self.allocator, chosen, news)
        if self.check(result, wanted):
            for kv_indices, new in zip(chosen, result.split(news), strict=True):
                if not kv_indices:
                    self.sequences.append(kv_indices)
                kv_indices += new.tolist()

    @rule(data=st.data())
    def decode_some(self, data):
        chosen = [kv_indices for kv_indices in self.sequences if data.draw(st.booleans())]
        assume(chosen)
        result = decode(self.allocator, chosen)
        if self.check(result, sum(len(kv_indices) % self.page_size == 0 for kv_indices in chosen)):
            for kv_indices, kv_index in zip(chosen, result.tolist(), strict=True):
                kv_indices.append(kv_index)

    @rule(num_pages=st.integers(0, 4))
    def take_whole_pages(self, num_pages):
        result = self.allocator.alloc(num_pages * self.page_size)
        if self.check(result, num_pages) and num_pages:
            self.sequences.append(result.tolist())

    @rule(data=st.data(), in_group=st.booleans())
    def free_some(self, data, in_group):
        leaving = [kv_indices for kv_indices in self.sequences if data.draw(st.booleans())]
        if in_group:
            self.allocator.free_group_begin()
            before = self.allocator.available_size()
        for kv_indices in leaving:
            self.allocator.free(torch.tensor(kv_indices))
        if in_group:
            assert self.allocator.available_size() == before, "the group is released at its end"
            self.allocator.free_group_end()
        self.sequences = [
            kv_indices for kv_indices in self.sequences if not any(kv_indices is gone for gone in leaving)
        ]

    @invariant()
    def every_page_has_one_owner_and_free_and_used_make_the_total(self):
        used = [page for kv_indices in self.sequences for page in self.pages(kv_indices)]
        assert len(used) == len(set(used)), "no page is given twice"
        free = self.allocator.free_pages.tolist()
        assert sorted(used + free) == list(range(1, NUM_PAGES + 1)), "page 0 is never given"
        assert self.allocator.available_size() == len(free) * self.page_size

    @invariant()
    def tokens_lie_in_their_page_where_their_position_says(self):
        size = self.page_size
        for kv_indices in self.sequences:
            assert [kv_index % size for kv_index in kv_indices] == [
                position % size for position in range(len(kv_indices))
            ]
            assert len(self.pages(kv_indices)) == -(-len(kv_indices) // size), (
                "a page is filled before the next is opened"
            )
            for start in range(0, len(kv_indices), size):
                assert len(self.pages(kv_indices[start : start + size])) == 1


AllocatorAgainstSets.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestPagesHaveOneOwnerAndTokensTheirPlace = AllocatorAgainstSets.TestCase


def test_an_extension_fills_the_open_page_before_a_new_one():
    allocator = make(4)
    first = extend(allocator, [[]], [3]).tolist()
    (more,) = [extend(allocator, [first], [2]).tolist()]
    assert more[0] == first[-1] + 1
    assert more[1] // 4 != first[0] // 4
    assert more[1] % 4 == 0


@pytest.mark.parametrize(("length", "opens"), [(1, False), (3, False), (4, True), (5, False), (8, True)])
def test_a_decode_step_opens_a_page_exactly_at_a_page_edge(length, opens):
    allocator = make(4)
    held = extend(allocator, [[]], [length]).tolist()
    before = allocator.available_size()
    (kv_index,) = decode(allocator, [held]).tolist()
    assert before - allocator.available_size() == (4 if opens else 0)
    assert (kv_index % 4 == 0) if opens else (kv_index == held[-1] + 1)


def test_a_batch_that_does_not_fit_takes_no_page():
    allocator = make(4, num_pages=3)
    held = extend(allocator, [[], []], [4, 4]).tolist()
    sequences = [held[:4], held[4:]]
    free = allocator.free_pages.clone()
    assert allocator.alloc(8) is None
    assert extend(allocator, [[], []], [4, 1]) is None
    assert decode(allocator, sequences) is None
    assert torch.equal(allocator.free_pages, free)
    assert decode(allocator, sequences[:1]) is not None


def test_clear_frees_every_page():
    allocator = make(4)
    allocator.alloc(4 * NUM_PAGES)
    allocator.clear()
    assert allocator.available_size() == 4 * NUM_PAGES
    assert sorted(allocator.alloc(4 * NUM_PAGES).tolist()) == list(range(4, 4 * NUM_PAGES + 4))


def test_used_pages_are_taken_before_fresh_ones():
    """The kernel gives a page its memory at the first write: a long run must not touch the whole pool over time."""
    allocator = make(4)
    touched: set[int] = set()
    held: list[torch.Tensor] = []
    for num_pages in (3, 1, 2, 3, 1, 2, 2) * 3:
        while sum(len(kv_indices) for kv_indices in held) // 4 + num_pages > 5:
            allocator.free(held.pop(0))
        held.append(allocator.alloc(4 * num_pages))
        touched |= set((held[-1] // 4).tolist())
    assert len(touched) == 5, "five pages were held at once, and never more"


def test_part_of_a_page_cannot_be_taken_as_whole_pages():
    with pytest.raises(AssertionError, match="6 tokens are not a whole number of pages"):
        make(4).alloc(6)


def test_freeing_nothing_changes_nothing():
    allocator = make(4)
    allocator.free(torch.empty(0, dtype=torch.int64))
    assert allocator.available_size() == 4 * NUM_PAGES


def test_staged_tokens_are_consecutive_and_take_no_page():
    allocator = make(4)
    with allocator.decoding_staged():
        assert decode(allocator, [[0, 1, 2, 3], [96, 97, 98, 99], [84]]).tolist() == [4, 100, 85]
    assert allocator.available_size() == NUM_PAGES * 4
    assert decode(allocator, [[4, 5, 6, 7], [8]]).tolist() == [4, 9], "freed pages are taken again"
    assert allocator.available_size() == (NUM_PAGES - 1) * 4
