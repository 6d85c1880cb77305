"""Sub-batches of streamed KV: every row once, within the device, and none brought over what is still attended."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_batch.core.decode_streaming import StreamedRow, StreamingChoice, bring_order, lay_out

rows_of = st.lists(
    st.builds(
        StreamedRow, slots=st.lists(st.integers(0, 12), max_size=5, unique=True).map(tuple), own_pages=st.integers(1, 3)
    ),
    min_size=1,
    max_size=30,
)


@given(rows=rows_of, total_pages=st.integers(8, 40), most_rows=st.integers(1, 8))
@settings(max_examples=300)
def test_every_row_has_its_pages_once_and_within_the_device(
    rows: list[StreamedRow], total_pages: int, most_rows: int
) -> None:
    parts = lay_out(rows, total_pages=total_pages, most_rows=most_rows)
    assert [row for part in parts for row in range(part.start, part.end)] == list(range(len(rows)))
    for part in parts:
        assert part.end - part.start == len(part.pages) <= most_rows
        taken: dict[int, object] = {}
        for number, pages in enumerate(part.pages, part.start):
            row = rows[number]
            assert len(pages) == len(row.slots) + row.own_pages
            own = pages[len(row.slots) :]
            assert own == list(range(own[0], own[0] + row.own_pages)), "the next token's page follows the last one's"
            for page, content in zip(
                pages, [*row.slots, *((number, index) for index in range(row.own_pages))], strict=True
            ):
                assert taken.setdefault(page, content) == content, "two contents in one page"
                assert 1 <= part.first <= page <= part.last <= total_pages
        assert len(taken) == part.last - part.first + 1, "and a content that rows share has one page"


@given(rows=rows_of, total_pages=st.integers(8, 40), most_rows=st.integers(1, 8))
def test_neighbours_lie_apart_unless_one_takes_more_than_half(
    rows: list[StreamedRow], total_pages: int, most_rows: int
) -> None:
    parts = lay_out(rows, total_pages=total_pages, most_rows=most_rows)
    for before, after in pairwise(parts):
        large = max(part.last - part.first + 1 for part in (before, after)) > total_pages // 2
        assert large or not before.overlaps(after)


@given(rows=rows_of, layers=st.integers(1, 4), most_rows=st.integers(1, 8), ahead=st.integers(1, 4))
def test_each_turn_comes_once_before_it_is_attended_and_over_nothing_that_is_needed(
    rows: list[StreamedRow], layers: int, most_rows: int, ahead: int
) -> None:
    parts = lay_out(rows, total_pages=10, most_rows=most_rows)
    order = list(bring_order(parts, layers, ahead=ahead))
    assert [turn for turns in order for turn in turns] == list(range(layers * len(parts)))
    assert len(order) == layers * len(parts) + 1
    on_device: dict[int, int] = {}  # turns that came, by layer
    for attended, turns in enumerate(order, -1):
        on_device.pop(attended, None)
        for turn in turns:
            layer, index = divmod(turn, len(parts))
            assert turn <= attended + ahead
            for other, its_layer in on_device.items():
                assert its_layer != layer or not parts[other % len(parts)].overlaps(parts[index])
            on_device[turn] = layer
        if attended + 1 < layers * len(parts):
            assert attended + 1 in on_device, "what is attended next has begun to come"


def test_whatever_fits_the_device_is_not_streamed() -> None:
    choice = StreamingChoice()
    choice.note(10, streamed=True, rows=1000, seconds=1)
    assert not choice.choose(10, fits=True)


def test_both_ways_are_measured_and_the_faster_one_stays() -> None:
    choice = StreamingChoice()
    assert choice.choose(100, fits=False)
    choice.note(100, streamed=True, rows=100, seconds=1)
    assert not choice.choose(100, fits=False)
    choice.note(100, streamed=False, rows=80, seconds=1)
    assert choice.choose(100, fits=False)
    choice.note(100, streamed=True, rows=70, seconds=1)
    assert not choice.choose(100, fits=False)


def test_a_clear_choice_holds_for_the_next_smaller_group_too() -> None:
    choice = StreamingChoice()
    choice.note(100, streamed=True, rows=100, seconds=1)
    choice.note(100, streamed=False, rows=200, seconds=1)
    assert not choice.choose(50, fits=False)
    choice.note(50, streamed=False, rows=100, seconds=1)
    assert choice.choose(20, fits=False), "nothing is known of so small a group"
