"""Owns how the seed of each choice follows from its request's seed. The sampler draws from it."""

from __future__ import annotations

import secrets

_MASK = (1 << 63) - 1


def choice_seed(seed: int | None, choice: int) -> int:
    """Return the seed of one choice, in 0..2**63-1. Choice 0 has the request's own seed, so n=1 and n=4 agree on it.

    A request without a seed gets one from the operating system.
    """
    if seed is None:
        return secrets.randbits(63)
    if choice == 0:
        return seed & _MASK
    x = (seed + choice * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
    return (x ^ (x >> 31)) & _MASK
