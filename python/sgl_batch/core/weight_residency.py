"""Owns which experts stay in memory where not all do, and which are read ahead. It reads nothing.

Layers come round and round. What was used last is needed last again, so that keeping the most recent would keep nothing
that helps: of every layer the same share stays, those that are asked for most often, and the others pass through the
slots that are left (BatchGen 5.3 streams all; what stays is read once).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from sgl_batch.errors import ConfigError

READ_AHEAD_SHARE = 0.9
"""Of a layer's experts: where fewer are likely to be asked for, only those that are asked for are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightResidency:
    """`slots`: experts of all layers that memory holds at once; `kept`: how many of each layer stay."""

    slots: int
    kept: int


def plan_residency(slots: int, *, layers: int, experts: int) -> WeightResidency:
    """What to do with `slots` for `layers` of `experts` each. Raises ConfigError where not even one layer fits.

    What a layer does not keep needs room twice: for the layer that computes, and for the next one that is read
    meanwhile. With less room than two layers nothing stays.
    """
    if slots < experts:
        raise ConfigError(f"memory for {slots} experts is less than the {experts} of a layer")
    if slots >= layers * experts:
        return WeightResidency(slots=layers * experts, kept=experts)
    # Here there are more than two layers, or fewer slots than two.
    spare = slots - 2 * experts
    return WeightResidency(slots=slots, kept=max(0, spare // (layers - 2)) if layers > 2 else 0)


def slots_to_stream(*, layers: int, experts: int) -> int:
    """How many slots experts need to come while others compute: two layers' worth."""
    return min(2, layers) * experts


def slots_that_fit(now: int, *, free: int, held: int, working: int, slot_bytes: int, least: int, most: int) -> int:
    """How many slots a forward pass leaves memory for; `now` unless others are worth it.

    `free`: bytes that the process may still take. `held`: bytes that slots have. `working`: bytes that the pass takes
    beside. There are `least` slots whatever is free. What is given back is read again, so that what the next pass needs
    is given back at once, and more is taken where it is a twentieth at least.
    """
    fit = min(most, max(least, (free + held - working) // slot_bytes))
    return fit if fit < now or fit == most or fit - now >= now // 20 else now


def read_ahead_pays(rows: int, *, top_k: int, experts: int) -> bool:
    """Whether a layer's experts are to be read before its router has chosen: nearly all of them will be chosen.

    `rows`: tokens of the expert call. The estimate takes choices as even; uneven ones ask for fewer experts.
    """
    return 1.0 - (1.0 - top_k / experts) ** rows >= READ_AHEAD_SHARE


def to_keep(
    present: Sequence[int], kept: AbstractSet[int], popularity: Mapping[int, float] | Sequence[float], room: int
) -> set[int]:
    """Which of a layer's experts in memory stay when it has been computed: the most popular, of equals those that did.

    `popularity`: by expert, how often it was asked for.
    """
    ranked = sorted(present, key=lambda expert: (-popularity[expert], expert not in kept, expert))
    return set(ranked[:room])
