"""Owns the models that are known by their configuration alone: models/*.json, each with its source."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from sgl_batch.errors import ConfigError
from sgl_batch.planner.model_layers import MOE, ModelLayers, model_layers

ITEM_BYTES = 2
# Bytes of a number in FP8, whose scales are less than a thousandth of it, and in MXFP4 with a byte for 32 of them.
FP8_BYTES, MXFP4_BYTES = 1.0, 4.25 / 8
_SUFFIX = ".json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterModel:
    """A model whose weights are not at hand.

    Attributes:
        name: As in `deepseek-r1`.
        title: Its name in reports.
        source: Where its configuration is from.
        layers: The numbers that costs depend on, of one rank alone.
        config: Its configuration, of which fields may be left out that sizes do not depend on.
        published: Its parameters as its authors give them, all and those that a token goes through.
    """

    name: str
    title: str
    source: str
    layers: ModelLayers
    config: Mapping[str, Any]
    published: tuple[float, float]

    @property
    def kv_token_bytes(self) -> float:
        """Return the bytes of the KV of one token, in all layers."""
        return self.layers.kv_layer_bytes * self.layers.num_layers

    @property
    def window_token_bytes(self) -> float:
        """Return the bytes of the KV of one token in the layers that attend a window."""
        return self.layers.kv_layer_bytes * self.layers.window_layers

    @property
    def expert_bytes(self) -> float:
        """Return the bytes of all routed experts."""
        layers = self.layers
        return layers.layers.get(MOE, 0) * layers.experts * layers.expert_bytes_each

    @property
    def other_bytes(self) -> float:
        """Return the bytes of all other weights: attention, dense and shared MLPs, routers, embeddings."""
        layers = self.layers
        dense = sum(
            count * (layers.shared_bytes + layers.router_bytes if kind == MOE else layers.dense_bytes)
            for kind, count in layers.layers.items()
        )
        return layers.num_layers * layers.attention_bytes + dense + layers.head_bytes + layers.embedding_bytes


def model_named(name: str) -> ClusterModel:
    """Return the model of a name such as `deepseek-r1`. Raises ConfigError, which lists the names."""
    folder = files("sgl_batch.simulator.cluster") / "models"
    known = sorted(entry.name.removesuffix(_SUFFIX) for entry in folder.iterdir() if entry.name.endswith(_SUFFIX))
    if name.lower() not in known:
        raise ConfigError(f"there is no model {name!r} here; it is one of {', '.join(known)}")
    entry = json.loads((folder / f"{name.lower()}{_SUFFIX}").read_text("utf-8"))
    published = entry["published"]
    return model_of(
        entry["config"],
        name=name.lower(),
        title=entry["name"],
        source=entry["source"],
        published=(published["parameters"], published["active"]),
    )


def model_of(
    config: Mapping[str, Any], *, name: str, title: str = "", source: str = "", published: tuple[float, float] = (0, 0)
) -> ClusterModel:
    """Return the model of a configuration. Raises ConfigError for number types of weights that are not counted here."""
    weight_bytes, expert_bytes = _number_bytes(config)
    layers = model_layers(config, item_bytes=ITEM_BYTES, weight_bytes=weight_bytes, expert_weight_bytes=expert_bytes)
    return ClusterModel(
        name=name, title=title or name, source=source, layers=layers, config=config, published=published
    )


def _number_bytes(config: Mapping[str, Any]) -> tuple[float, float]:
    """Return the bytes of a number of the weights of layers, and of those of the routed experts."""
    method = (config.get("quantization_config") or {}).get("quant_method")
    found = {None: (2.0, 2.0), "fp8": (FP8_BYTES, FP8_BYTES), "mxfp4": (2.0, MXFP4_BYTES)}.get(method)
    if found is None:
        raise ConfigError(f"weights quantised by {method} are not counted here; bfloat16, fp8 and mxfp4 are")
    return found
