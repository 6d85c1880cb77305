"""Decides which experts stay in memory if not all fit, and which are read ahead. It reads no weights.

Passes use the layers in turn, so the experts used last are needed last again, and keeping the most recently used ones
would not help. Instead the same number of experts of every layer stays, those that are used most often, and the others
pass through the expert slots that are left. (BatchGen 5.3 streams all experts; here those that stay are read once.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from sgl_batch.errors import ConfigError

READ_AHEAD_SHARE = 0.9
"""A layer's experts are read ahead if this share of them is likely to be chosen; else only the chosen ones are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightResidency:
    """`slots`: how many experts, of all layers, memory holds at once. `kept`: how many of each layer stay."""

    slots: int
    kept: int


def plan_residency(slots: int, *, layers: int, experts: int) -> WeightResidency:
    """Return how to use `slots` expert slots for `layers` of `experts` each.

    Experts that do not stay need slots for two layers: the layer that computes, and the next one, which is read
    meanwhile. With fewer slots than two layers' experts none stay. Raises ConfigError if not even one layer fits.
    """
    if slots < experts:
        raise ConfigError(f"memory for {slots} experts is less than the {experts} of a layer")
    if slots >= layers * experts:
        return WeightResidency(slots=layers * experts, kept=experts)
    # Here there are more than two layers, or fewer slots than two layers' experts.
    spare = slots - 2 * experts
    return WeightResidency(slots=slots, kept=max(0, spare // (layers - 2)) if layers > 2 else 0)


def slots_to_stream(*, layers: int, experts: int) -> int:
    """Return how many slots let experts be read while others compute: those of two layers."""
    return min(2, layers) * experts


def slots_that_fit(now: int, *, free: int, held: int, working: int, slot_bytes: int, least: int, most: int) -> int:
    """Return how many slots a forward pass leaves memory for, or `now` if a change is not worth it.

    Experts whose slots are given back are read again. So slots are given back only when the next pass needs the memory,
    and taken only if that adds a twentieth at least.

    Args:
        now: present number of slots.
        free: bytes that the process may still take.
        held: bytes of the present slots.
        working: bytes that the pass takes besides slots.
        slot_bytes: bytes of a slot.
        least: the number of slots that there are however little is free.
        most: the most slots that are of use.
    """
    fit = min(most, max(least, (free + held - working) // slot_bytes))
    return fit if fit < now or fit == most or fit - now >= now // 20 else now


def read_ahead_pays(rows: int, *, top_k: int, experts: int) -> bool:
    """Return whether to read a layer's experts before its router has chosen, because nearly all will be chosen.

    `rows`: tokens of the expert call. The estimate assumes even choices; uneven ones need fewer experts.
    """
    return 1.0 - (1.0 - top_k / experts) ** rows >= READ_AHEAD_SHARE


def to_keep(
    present: Sequence[int], kept: AbstractSet[int], popularity: Mapping[int, float] | Sequence[float], room: int
) -> set[int]:
    """Return which of a layer's experts stay in memory after its computation: the most popular `room` ones.

    Of equally popular experts, those of `kept` stay. `present`: those in memory. `popularity`: by expert, how often it
    was chosen.
    """
    ranked = sorted(present, key=lambda expert: (-popularity[expert], expert not in kept, expert))
    return set(ranked[:room])
