"""A partial output is the beginning of an answer, and takes no more tokens than its budget."""

from __future__ import annotations

from sgl_batch.core.partial_output import PartialOutput, TokenBudget, unpack


def test_tokens_are_added_part_after_part():
    partial = PartialOutput()
    partial.put(0, [5, 6])
    partial.put(2, [7])
    assert list(partial.tokens) == [5, 6, 7]
    assert list(PartialOutput(partial.pack()).tokens) == [5, 6, 7]


def test_tokens_put_again_replace_all_after_them():
    partial = PartialOutput()
    partial.put(0, [5, 6, 7, 8])
    partial.put(1, [9])
    assert list(partial.tokens) == [5, 9]


def test_tokens_after_a_gap_are_left_out():
    partial = PartialOutput()
    partial.put(0, [5])
    partial.put(2, [7])
    assert list(partial.tokens) == [5]


def test_partial_outputs_share_a_budget_and_give_back_their_tokens():
    budget = TokenBudget(5)
    first, second = PartialOutput(budget=budget), PartialOutput(budget=budget)
    first.put(0, [1, 2, 3])
    second.put(0, [4, 5, 6])
    assert list(second.tokens) == [4, 5], "tokens within the budget are taken"
    second.put(3, [7])
    assert (len(second), budget.left) == (2, 0)
    first.put(0, [1, 8])
    assert budget.left == 1
    first.close()
    first.put(0, [1])
    assert (len(first), budget.left) == (0, 3)


def test_updates_bring_a_copy_up_to_date():
    partial, copy = PartialOutput(), PartialOutput()

    def publish() -> bool:
        update = partial.take_update()
        if update is None:
            return False
        copy.put(update[0], unpack(update[1]))
        return True

    assert not publish()
    partial.put(0, [1, 2])
    assert publish()
    partial.put(2, [3])
    assert partial.take_update() == (2, PartialOutput(b"\3\0\0\0").pack()), "only new tokens"
    copy.put(2, [3])
    assert not publish()
    partial.cut(1)
    partial.put(1, [8, 9, 10])
    assert publish()
    assert list(copy.tokens) == [1, 8, 9, 10], "also if as many tokens were put again as were cut"
    partial.cut(0)
    assert publish()
    assert len(copy) == 0


def test_a_received_partial_output_has_no_update():
    partial = PartialOutput(PartialOutput(b"\1\0\0\0").pack())
    assert partial.take_update() is None
    partial.put(1, [2])
    assert partial.take_update() == (1, b"\2\0\0\0")
