"""Parts of answers from several senders are read in order, and none is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sgl_batch.core.output_order import OutputOrder, Part


def part(request_id: str, start: int, end: int, *, is_last: bool = False) -> Part:
    return Part(request_id=request_id, start=start, end=end, is_last=is_last)


def test_what_the_target_of_a_move_sends_waits_for_what_the_source_has_sent() -> None:
    order: OutputOrder[str] = OutputOrder()
    assert order.take("target", [part("a", 50, 70, is_last=True)]) == []
    assert order.take("other", [part("b", 0, 1)]) == ["other"]
    assert order.take("source", [part("a", 0, 50)]) == ["source", "target"]


def test_a_message_waits_for_each_of_its_answers() -> None:
    order: OutputOrder[str] = OutputOrder()
    assert order.take("both", [part("a", 1, 2), part("b", 1, 2)]) == []
    assert order.take("next of b", [part("b", 2, 3)]) == []
    assert order.take("first of a", [part("a", 0, 1)]) == ["first of a"]
    assert order.take("first of b", [part("b", 0, 1)]) == ["first of b", "both", "next of b"]


def test_what_has_no_parts_does_not_wait() -> None:
    order: OutputOrder[str] = OutputOrder()
    order.take("waits", [part("a", 1, 2)])
    assert order.take("control", []) == ["control"]


def test_an_answer_may_end_before_what_was_sent() -> None:
    """A stop string is found after a part that holds its first tokens."""
    order: OutputOrder[str] = OutputOrder()
    order.take("first", [part("a", 0, 8)])
    assert order.take("last", [part("a", 7, 7, is_last=True)]) == ["last"]


def test_an_id_can_be_used_again() -> None:
    order: OutputOrder[str] = OutputOrder()
    order.take("last", [part("a", 0, 8, is_last=True)])
    assert order.take("waits", [part("a", 4, 8)]) == []
    assert order.take("anew", [part("a", 0, 4)]) == ["anew", "waits"]


@given(st.data())
def test_any_arrival_gives_each_answer_in_order(data: st.DataObject) -> None:
    """Senders take turns with each answer, and send a message of several; their messages arrive in any order."""
    senders: list[list[list[Part]]] = [[], [], []]
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    for step in range(max(lengths)):
        owners = data.draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
        for sender in range(3):
            parts = [
                part(f"{number}", step, step + 1, is_last=step + 1 == length)
                for number, length in enumerate(lengths)
                if owners[number] == sender and step < length
            ]
            if parts:
                senders[sender].append(parts)
    order: OutputOrder[list[Part]] = OutputOrder()
    read: list[Part] = []
    while any(senders):
        sender = data.draw(st.sampled_from([number for number in range(3) if senders[number]]))
        message = senders[sender].pop(0)
        read += [one for ready in order.take(message, message) for one in ready]
    for number, length in enumerate(lengths):
        assert [one.start for one in read if one.request_id == f"{number}"] == list(range(length))
