"""A record is the beginning of an answer, never more than that, and takes no more than there is room for."""

from __future__ import annotations

from sgl_batch.core.partial_output import PartialOutput, TokenBudget, unpack


def test_tokens_come_part_after_part():
    record = PartialOutput()
    record.put(0, [5, 6])
    record.put(2, [7])
    assert list(record.tokens) == [5, 6, 7]
    assert list(PartialOutput(record.pack()).tokens) == [5, 6, 7]


def test_what_is_said_anew_replaces_what_was_behind_it():
    record = PartialOutput()
    record.put(0, [5, 6, 7, 8])
    record.put(1, [9])
    assert list(record.tokens) == [5, 9]


def test_what_follows_after_a_gap_is_left_out():
    record = PartialOutput()
    record.put(0, [5])
    record.put(2, [7])
    assert list(record.tokens) == [5]


def test_records_share_a_budget_and_give_back_what_they_had():
    budget = TokenBudget(5)
    first, second = PartialOutput(budget=budget), PartialOutput(budget=budget)
    first.put(0, [1, 2, 3])
    second.put(0, [4, 5, 6])
    assert list(second.tokens) == [4, 5], "the first of them count all the same"
    second.put(3, [7])
    assert (len(second), budget.left) == (2, 0)
    first.put(0, [1, 8])
    assert budget.left == 1
    first.close()
    first.put(0, [1])
    assert (len(first), budget.left) == (0, 3)


def test_news_bring_another_record_up_to_date():
    record, other = PartialOutput(), PartialOutput()

    def tell() -> bool:
        news = record.take_update()
        if news is None:
            return False
        other.put(news[0], unpack(news[1]))
        return True

    assert not tell()
    record.put(0, [1, 2])
    assert tell()
    record.put(2, [3])
    assert record.take_update() == (2, PartialOutput(b"\3\0\0\0").pack()), "only what is new"
    other.put(2, [3])
    assert not tell()
    record.cut(1)
    record.put(1, [8, 9, 10])
    assert tell()
    assert list(other.tokens) == [1, 8, 9, 10], "also where as many came again as were there"
    record.cut(0)
    assert tell()
    assert len(other) == 0


def test_of_a_record_that_came_from_elsewhere_nothing_is_news():
    record = PartialOutput(PartialOutput(b"\1\0\0\0").pack())
    assert record.take_update() is None
    record.put(1, [2])
    assert record.take_update() == (1, b"\2\0\0\0")
