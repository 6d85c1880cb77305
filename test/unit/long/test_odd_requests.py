"""Owns the rules for the odd requests of a long run: all kinds occur, numbers repeat, and faults are recognised."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import odd_requests
import pytest
from odd_requests import KINDS, is_allowed, one_request


def test_kinds_occur_by_their_weights_and_a_number_always_gives_the_same_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stand_in(name: str) -> Callable[[str, random.Random], int]:
        def kind(url: str, dice: random.Random) -> int:
            return dice.randint(0, 10**9)

        kind.__name__ = name
        return kind

    named = [(stand_in(kind.__name__), weight) for kind, weight in KINDS]
    monkeypatch.setattr(odd_requests, "KINDS", named)
    found = [one_request("http://nowhere", number) for number in range(3000)]
    assert found[:50] == [one_request("http://nowhere", number) for number in range(50)]
    counts = Counter(name for name, _ in found)
    assert sum(weight for _, weight in KINDS) == 100
    for kind, weight in KINDS:
        assert counts[kind.__name__] == pytest.approx(30 * weight, rel=0.35)


def test_a_refusal_is_allowed_and_a_fault_is_not() -> None:
    assert all(is_allowed(status) for status in (0, 200, 400, 404, 405, 413, 429))
    assert not any(is_allowed(status) for status in (500, 502, 503))
