"""The units of a pass: which exist, in which order the engine runs them, and which may run next."""

from __future__ import annotations

import pytest

from sgl_batch.core.units import (
    ATTENTION,
    ATTENTION_AND_EXPERTS,
    EXPERTS,
    FUSED,
    HEAD,
    SPLIT,
    YIELD_OPTIONS,
    PassShape,
    Unit,
    admissible,
    needs,
    static_order,
)

DECODE = (None, None, None)
# Two decode sub-batches, then three of prompts.
MIXED = (None, None, None, 2, 3)


def shape(yield_option: str, after: tuple[int | None, ...] = DECODE, num_layers: int = 2) -> PassShape:
    return PassShape(num_layers, after, yield_option)


def of_layer(kind: str, layer: int, *numbers: int) -> list[Unit]:
    return [Unit(kind, layer, number) for number in numbers]


def test_split_units_are_attention_by_sub_batch_then_the_experts_of_all_layer_by_layer() -> None:
    assert static_order(shape(SPLIT)) == (
        *of_layer(ATTENTION, 0, 0, 1, 2),
        *of_layer(EXPERTS, 0, 0),
        *of_layer(ATTENTION, 1, 0, 1, 2),
        *of_layer(EXPERTS, 1, 0),
        Unit(HEAD, 2, 0),
    )


def test_fused_units_are_attention_and_experts_of_a_sub_batch_layer_by_layer() -> None:
    assert static_order(shape(FUSED)) == (
        *of_layer(ATTENTION_AND_EXPERTS, 0, 0, 1, 2),
        *of_layer(ATTENTION_AND_EXPERTS, 1, 0, 1, 2),
        Unit(HEAD, 2, 0),
    )


@pytest.mark.parametrize("option", YIELD_OPTIONS)
@pytest.mark.parametrize("after", [DECODE, MIXED, (None,), (None, 0)])
def test_the_static_order_is_admissible(option: str, after: tuple[int | None, ...]) -> None:
    given, done = shape(option, after, 3), set[Unit]()
    for unit in static_order(given):
        assert unit in admissible(given, done)
        done.add(unit)
    assert admissible(given, done) == []


def test_experts_wait_for_all_sub_batches_of_the_layer_and_the_next_layer_for_them() -> None:
    done = {Unit(ATTENTION, 0, 0), Unit(ATTENTION, 0, 2)}
    assert admissible(shape(SPLIT), done) == [Unit(ATTENTION, 0, 1)]
    done.add(Unit(ATTENTION, 0, 1))
    assert admissible(shape(SPLIT), done) == [Unit(EXPERTS, 0, 0)]
    done.add(Unit(EXPERTS, 0, 0))
    assert admissible(shape(SPLIT), done) == of_layer(ATTENTION, 1, 0, 1, 2)


def test_a_fused_sub_batch_may_be_layers_ahead_of_another() -> None:
    done = set(of_layer(ATTENTION_AND_EXPERTS, 0, 1) + of_layer(ATTENTION_AND_EXPERTS, 1, 1))
    ahead = [*of_layer(ATTENTION_AND_EXPERTS, 0, 0, 2), Unit(ATTENTION_AND_EXPERTS, 2, 1)]
    assert admissible(shape(FUSED, num_layers=4), done) == ahead
    assert Unit(HEAD, 2, 0) not in admissible(shape(FUSED), done), "it waits for the others"


@pytest.mark.parametrize(("option", "kind"), [(SPLIT, ATTENTION), (FUSED, ATTENTION_AND_EXPERTS)])
def test_attention_of_prompts_runs_in_order_within_a_layer(option: str, kind: str) -> None:
    assert admissible(shape(option, MIXED), set()) == of_layer(kind, 0, 0, 1, 2)
    assert Unit(kind, 1, 2) in needs(shape(option, MIXED), Unit(kind, 1, 3))
