"""Sub-batches of streamed KV: each row once, within the device, and never copied over pages that attention reads."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_batch.core.decode_streaming import StreamedRow, StreamingChoice, first_turns, lay_out, take_turns

rows_of = st.lists(
    st.builds(
        StreamedRow,
        store_blocks=st.lists(st.integers(0, 12), max_size=5, unique=True).map(tuple),
        own_pages=st.integers(1, 3),
    ),
    min_size=1,
    max_size=30,
)


@given(rows=rows_of, half_pages=st.integers(1, 20), most_rows=st.integers(1, 8))
@settings(max_examples=300)
def test_every_row_has_its_pages_once_and_within_a_half(
    rows: list[StreamedRow], half_pages: int, most_rows: int
) -> None:
    parts = lay_out(rows, half_pages=half_pages, most_rows=most_rows)
    assert [row for part in parts for row in range(part.start, part.end)] == list(range(len(rows)))
    for part in parts:
        assert part.end - part.start == len(part.pages) <= most_rows
        assert part.large == (part.num_pages > half_pages)
        assert not part.large or part.end - part.start == 1
        taken: dict[int, object] = {}
        for number, pages in enumerate(part.pages, part.start):
            row = rows[number]
            own = pages[len(row.store_blocks) :]
            assert own == list(range(own[0], own[0] + row.own_pages)), "the next token's page follows the last one's"
            contents = [*row.store_blocks, *((number, index) for index in range(row.own_pages))]
            for page, content in zip(pages, contents, strict=True):
                assert taken.setdefault(page, content) == content, "two contents in one page"
        assert sorted(taken) == list(range(part.num_pages)), "content that rows share has one page"


@given(rows=rows_of, half_pages=st.integers(1, 20))
def test_a_sub_batch_is_as_large_as_a_half_allows(rows: list[StreamedRow], half_pages: int) -> None:
    parts = lay_out(rows, half_pages=half_pages, most_rows=len(rows))
    for before, after in pairwise(parts):
        first = rows[after.start]
        new = len(set(first.store_blocks) - before.page_of.keys()) + first.own_pages
        assert before.num_pages + new > half_pages


@given(rows=rows_of, half_pages=st.integers(1, 20), layers=st.integers(1, 4), most_rows=st.integers(1, 8))
def test_each_turn_is_copied_once_before_its_attention_and_never_over_pages_in_use(
    rows: list[StreamedRow], half_pages: int, layers: int, most_rows: int
) -> None:
    parts = lay_out(rows, half_pages=half_pages, most_rows=most_rows)
    turns = take_turns(parts, layers)
    assert [(turn.layer, turn.index) for turn in turns] == [
        (i // len(parts), i % len(parts)) for i in range(len(turns))
    ]
    coming, came = first_turns(turns), set[int]()
    on_device: dict[int, set[int]] = {}  # halves by turn
    leaving: dict[int, set[int]] = {}
    for number, turn in enumerate(turns):
        for other in coming:
            takes = {0, 1} if parts[turns[other].index].large else {turns[other].half}
            assert not any(takes & halves for halves in on_device.values()), "it is copied over pages in use"
            on_device[other] = takes
            came.add(other)
        assert number in on_device, "the copy of a turn has begun before its attention"
        assert (
            parts[turn.index].large
            or number + 1 == len(turns)
            or number + 1 in came
            or (parts[turns[number + 1].index].large)
        ), "and so has the copy of the next turn"
        for other in turn.frees:
            leaving.pop(other, None)
        assert not any(on_device[number] & halves for halves in leaving.values()), (
            "no copy to the store reads its pages"
        )
        leaving[number] = on_device.pop(number)
        coming = list(turn.then)
    assert came == set(range(len(turns)))
    assert not coming


def test_sequences_that_fit_the_device_are_not_streamed() -> None:
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


def test_a_clear_winner_holds_for_the_next_smaller_group_too() -> None:
    choice = StreamingChoice()
    choice.note(100, streamed=True, rows=100, seconds=1)
    choice.note(100, streamed=False, rows=200, seconds=1)
    assert not choice.choose(50, fits=False)
    choice.note(50, streamed=False, rows=100, seconds=1)
    assert choice.choose(20, fits=False), "nothing was measured for so small a group"
