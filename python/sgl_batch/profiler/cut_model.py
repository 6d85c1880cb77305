"""Decides how a model is cut to few layers of each kind, by fields of its config that SGLang overrides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Weights of the layers of a kind together: more than a cache holds, as a whole model's are; and no more than load soon.
_LEAST_WEIGHT_BYTES, _MOST_WEIGHT_BYTES = 64 << 20, 1 << 30
_MOST_LAYERS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class CutModel:
    """A model cut to few layers. `overrides`: of its config; `layers`: the indices of the layers of each kind."""

    overrides: Mapping[str, Any]
    layers: Mapping[str, Sequence[int]]


def cut(kinds: Sequence[str], layer_bytes: float) -> CutModel:
    """Return the cut of a model with layers of these kinds, which take about `layer_bytes` each.

    A model of one kind keeps as many layers as load soon, since what a pass takes by layer shows in several; one of
    several kinds keeps its beginning, up to two layers of each kind.
    """
    layer_bytes = max(layer_bytes, 1)
    each = max(2, math.ceil(_LEAST_WEIGHT_BYTES / layer_bytes), int(_MOST_WEIGHT_BYTES / layer_bytes))
    each = min(each, _MOST_LAYERS)
    found = tuple(dict.fromkeys(kinds))
    wanted = {kind: min(each if len(found) == 1 else 2, kinds.count(kind)) for kind in found}
    length = next(
        length
        for length in range(1, len(kinds) + 1)
        if all(kinds[:length].count(kind) >= count for kind, count in wanted.items())
    )
    layers = {kind: [index for index in range(length) if kinds[index] == kind] for kind in found}
    return CutModel(overrides={"num_hidden_layers": length}, layers=layers)
