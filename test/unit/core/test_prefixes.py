"""Prompt pages are found by their tokens, and live until the last sequence that holds them is released."""

from __future__ import annotations

import random
from array import array

import pytest
from sequence_builders import sequence

from sgl_batch.core.prefixes import PrefixTree, estimate_shared

PAGE = 4


@pytest.fixture
def tree() -> PrefixTree:
    return PrefixTree(PAGE)


def tokens(*numbers: int) -> array[int]:
    return array("q", numbers)


def test_the_whole_pages_with_which_two_prompts_begin_are_shared(tree):
    first = tree.match_and_insert("a", tokens(*range(11)))
    second = tree.match_and_insert("b", tokens(*range(9), 77, 78, 79))
    assert (len(first.pages), first.shared) == (2, 0)
    assert (len(second.pages), second.shared) == (3, 2)
    assert second.found == first.pages
    assert tree.num_pages == 3


def test_a_page_is_the_same_only_after_the_same_pages(tree):
    tree.match_and_insert("a", tokens(*range(9)))
    assert tree.match_and_insert("b", tokens(9, 9, 9, 9, *range(4, 9))).shared == 0


@pytest.mark.parametrize(("length", "shared"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2)])
def test_the_page_of_the_last_token_is_never_found(tree, length, shared):
    tree.match_and_insert("a", tokens(*range(12)))
    assert tree.match_and_insert("b", tokens(*range(length))).shared == shared


def test_an_equal_prompt_computes_its_last_page_for_itself(tree):
    tree.match_and_insert("a", tokens(*range(8)))
    assert len(tree.match_and_insert("b", tokens(*range(8))).pages) == 1
    assert [page.key for page in tree.release("a")] == [tokens(*range(4, 8)).tobytes()]
    assert len(tree.release("b")) == 1


def test_pages_of_an_ended_sequence_are_found_while_another_holds_them(tree):
    tree.match_and_insert("a", tokens(*range(9)))
    tree.match_and_insert("b", tokens(*range(9)))
    assert tree.release("a") == ()
    assert tree.match_and_insert("c", tokens(*range(9))).shared == 2
    tree.release("b")
    assert len(tree.release("c")) == 2
    assert tree.match_and_insert("d", tokens(*range(9))).shared == 0


def test_unlisted_pages_are_found_only_by_match_as(tree):
    tree.match_and_insert("leader", tokens(*range(9)), listed=False)
    assert tree.match_and_insert("other", tokens(*range(9))).shared == 0
    assert tree.match_and_insert("again", tokens(*range(9)), listed=False).shared == 0
    assert tree.match_as("choice", "leader", 2).shared == 2
    assert tree.num_pages == 6
    assert tree.release("leader") == ()
    assert len(tree.release("choice")) == 2


def test_a_sequence_without_pages_releases_none(tree):
    assert tree.release("a") == ()
    assert tree.match_of("a").pages == ()


def test_an_estimate_is_what_prefill_shares_and_leaves_the_tree_unchanged(tree):
    rng = random.Random(3)
    prompts = [tokens(*(rng.randrange(2) for _ in range(rng.randrange(1, 20)))) for _ in range(30)]
    tree.match_and_insert("alive", prompts[0])
    before = tree.num_pages
    queue = [sequence(number, prompt=len(prompt)) for number, prompt in enumerate(prompts)]
    estimate_shared(zip(queue, [None, *prompts[1:]], strict=True), tree, rows=10_000)
    assert tree.num_pages == before
    found = [
        tree.match_and_insert(s.sequence_id, prompt).shared * PAGE
        for s, prompt in zip(queue[1:], prompts[1:], strict=True)
    ]
    assert [s.shared_tokens for s in queue] == [0, *found]
    assert any(found)


def test_an_estimate_ends_with_the_first_sequence_that_a_group_has_no_room_for(tree):
    queue = [sequence(number, prompt=9) for number in range(5)]
    asked = []

    def prompts():
        for each in queue:
            asked.append(each.arrival)
            yield each, tokens(*range(9))

    estimate_shared(prompts(), tree, rows=10)
    assert asked == [0, 1, 2], "9 rows, then 1 each: the third exceeds 10"


@pytest.mark.parametrize("seed", range(20))
def test_holders_of_pages_are_conserved_under_random_operations(seed):
    """Compared with a plain model: the prefixes that each sequence holds, by their tokens."""
    rng = random.Random(seed)
    tree, alive, model = PrefixTree(PAGE), {}, {}
    for step in range(400):
        if alive and rng.random() < 0.45:
            name = rng.choice(list(alive))
            del alive[name]
            gone = model.pop(name)
            left = set().union(*model.values())
            assert {page_path(page) for page in tree.release(name)} == gone - left
        else:
            name, prompt = f"s{step}", tokens(*(rng.randrange(2) for _ in range(rng.randrange(1, 24))))
            known, found = set().union(*model.values()), 0
            while (found + 1) * PAGE < len(prompt) and path(prompt, found + 1) in known:
                found += 1
            match = tree.match_and_insert(name, prompt)
            assert match.shared == found
            assert len(match.pages) - len(prompt) // PAGE in (0, -1)
            alive[name], model[name] = prompt, {page_path(page) for page in match.pages}
        assert tree.num_pages == len(set().union(*model.values()))
        assert sum(page.holders for page in all_pages(tree, alive)) == sum(len(tree.match_of(n).pages) for n in alive)
    for name in list(alive):
        tree.release(name)
    assert tree.num_pages == 0
    assert tree.match_and_insert("last", tokens(*[0] * 9)).shared == 0


def path(prompt: array[int], pages: int) -> bytes:
    return prompt[: pages * PAGE].tobytes()


def page_path(page) -> bytes:
    return b"" if page.parent is None else page_path(page.parent) + page.key


def all_pages(tree, names):
    return {id(page): page for name in names for page in tree.match_of(name).pages}.values()


def test_invalidated_pages_are_not_found_and_can_be_released(tree):
    tree.match_and_insert("before", tokens(*range(9)))
    tree.invalidate()
    assert tree.match_and_insert("after", tokens(*range(9))).shared == 0
    assert tree.match_and_insert("behind", tokens(*range(9))).shared == 2
    assert [len(tree.release(name)) for name in ("before", "after", "behind")] == [2, 0, 2]
    assert tree.num_pages == 0
