"""Owns the numbers of a model that costs depend on: its layers by kind, and the bytes and operations of their parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sgl_batch.core.device_budget import ModelShape
from sgl_batch.core.model_numbers import NUM_EXPERTS, Value, head_dims, kv_token_bytes, number, shape_of
from sgl_batch.errors import ConfigError

DENSE, MOE = "dense", "moe"
_NEEDED = (
    ("hidden_size", "n_embd"),
    ("num_hidden_layers", "n_layer"),
    ("num_attention_heads", "n_head"),
    ("vocab_size",),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayers:
    """A model as the planner sees it.

    Attributes:
        layers: How many layers it has of each kind.
        attention_bytes: Bytes of the weights of a layer's attention.
        dense_bytes: Bytes of the MLP of a dense layer.
        expert_bytes_each: Bytes of one routed expert.
        experts, top_k: Routed experts of a layer, and how many a token goes to.
        kv_layer_bytes: KV of a token in one layer.
        hidden_bytes: A row's hidden state.
        shared_bytes: Bytes of the experts that all rows of an MoE layer go through.
        router_bytes: Bytes of the weights of a router.
        head_bytes: Bytes of the weights that logits are computed with.
        prefill_flop, decode_flop: Operations of a layer's attention for a row and one token that it looks at.
        kv_heads: Into how many parts the KV of a token can be split.
        embedding_bytes: Bytes of the embedding of tokens, where it is not what logits are computed with.
        weight_bytes: Bytes of one number of the weights of attention, MLPs and shared experts.
        expert_weight_bytes: Bytes of one number of the routed experts; None where it is weight_bytes.
        window, window_layers: How many layers attend only so many of the last tokens.
        ranks: How many ranks share the routed experts; each has rows of its own.
        stored_expert_bytes: Bytes of one routed expert where it is streamed from; 0: as many as `expert_bytes_each`.
    """

    layers: Mapping[str, int]
    attention_bytes: float
    dense_bytes: float
    expert_bytes_each: float
    experts: int
    top_k: int
    kv_layer_bytes: float
    hidden_bytes: float
    shared_bytes: float = 0.0
    router_bytes: float = 0.0
    head_bytes: float = 0.0
    prefill_flop: float = 0.0
    decode_flop: float = 0.0
    kv_heads: int = 1
    embedding_bytes: float = 0.0
    weight_bytes: float = 2.0
    expert_weight_bytes: float | None = None
    window: int = 0
    window_layers: int = 0
    ranks: int = 1
    stored_expert_bytes: float = 0.0

    @property
    def num_layers(self) -> int:
        """Return all layers."""
        return sum(self.layers.values())

    @property
    def last_kind(self) -> str:
        """Return the kind of the last layer: the dense layers of a model with experts lie before others."""
        return MOE if self.layers.get(MOE) else DENSE

    @property
    def expert_number_bytes(self) -> float:
        """Return the bytes of one number of the routed experts."""
        return self.expert_weight_bytes or self.weight_bytes

    def parameters(self, item_bytes: float) -> tuple[float, float]:
        """Return how many parameters there are, and through how many of them a token goes. Norms are left out.

        `item_bytes`: of a number of the router, of embeddings and of what logits are computed with.
        """
        dense, sparse = self.layers.get(DENSE, 0), self.layers.get(MOE, 0)
        plain = self.num_layers * self.attention_bytes + dense * self.dense_bytes + sparse * self.shared_bytes
        always = plain / self.weight_bytes + (sparse * self.router_bytes + self.head_bytes) / item_bytes
        expert = sparse * self.expert_bytes_each / self.expert_number_bytes
        return always + self.embedding_bytes / item_bytes + self.experts * expert, always + self.top_k * expert

    def experts_reached(self, rows: float) -> float:
        """Return how many experts of a rank get rows, if each row chooses evenly and by itself.

        `rows`: of each rank.
        """
        if not self.experts:
            return 0.0
        missed = float((1 - self.top_k / self.experts) ** (rows * self.ranks))
        return self.experts * (1 - missed) / self.ranks

    def expert_bytes(self, kind: str) -> Callable[[float], float]:
        """Return the bytes that the experts of a layer, or its MLP, read for so many rows."""
        if kind == DENSE:
            return lambda _: max(self.dense_bytes, 1.0)
        return lambda rows: max(self.experts_reached(rows) * self.expert_bytes_each + self.shared_bytes, 1.0)

    def expert_work(self, kind: str) -> Callable[[float], float]:
        """Return what the operations of the experts of a layer, or of its MLP, are proportional to."""
        if kind == DENSE:
            return lambda rows: max(self.dense_bytes * rows, 1.0)
        return lambda rows: max((self.top_k * self.expert_bytes_each + self.shared_bytes) * rows, 1.0)


def layer_kinds(text: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer, by the text part of a model's config. Raises ConfigError where a field is missing.

    Qwen's models have experts in each layer whose number, from 1 on, is a multiple of decoder_sparse_step; DeepSeek's
    behind the first dense ones.
    """
    for names in _NEEDED:
        try:
            found = number(text.get, *names)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{names[0]} in the model's config.json is no number: {error}") from error
        if found < 1:
            raise ConfigError(f"the model's config.json has no {names[0]}, by which its layers are counted")
    count = number(text.get, "num_hidden_layers", "n_layer")
    if not number(text.get, *NUM_EXPERTS):
        return [DENSE] * count
    dense_first, only = number(text.get, "first_k_dense_replace"), text.get("mlp_only_layers") or ()
    step = max(number(text.get, "decoder_sparse_step", default=1), 1)
    return [DENSE if layer < dense_first or layer in only or (layer + 1) % step else MOE for layer in range(count)]


def model_layers(
    text: Mapping[str, Any],
    *,
    item_bytes: int,
    weight_bytes: float,
    expert_weight_bytes: float | None = None,
    stored_bytes: float | None = None,
) -> ModelLayers:
    """Return the numbers of a model.

    `item_bytes`: of a number of KV and rows; `weight_bytes`: of a layer's weights; `expert_weight_bytes`: of those of
    the routed experts, where their number type is another one; `stored_bytes`: of these where they are streamed from,
    where that is another one again.
    """
    kinds, hidden = layer_kinds(text), number(text.get, "hidden_size", "n_embd")
    vocabulary = number(text.get, "vocab_size")
    shape = shape_of(
        text.get,
        hidden=hidden,
        vocabulary=vocabulary,
        layers=len(kinds),
        head_dim=max(head_dims(text.get)),
        item_bytes=item_bytes,
    )
    shared = number(text.get, "n_shared_experts") * shape.expert_width if shape.experts else 0
    prefill_flop, decode_flop = _attention_flop(text.get)
    expert_numbers = 3 * hidden * shape.expert_width
    head_bytes = hidden * vocabulary * item_bytes
    return ModelLayers(
        layers={kind: kinds.count(kind) for kind in (DENSE, MOE) if kind in kinds},
        attention_bytes=_attention_weights(text.get, shape) * weight_bytes,
        dense_bytes=3 * hidden * number(text.get, "intermediate_size", "n_inner") * weight_bytes,
        expert_bytes_each=expert_numbers * (expert_weight_bytes or weight_bytes),
        experts=shape.experts,
        top_k=shape.top_k or shape.experts,
        kv_layer_bytes=kv_token_bytes(text.get, item_bytes) / len(kinds),
        hidden_bytes=hidden * item_bytes,
        shared_bytes=3 * hidden * number(text.get, "shared_expert_intermediate_size", default=shared) * weight_bytes,
        router_bytes=hidden * shape.experts * item_bytes,
        head_bytes=head_bytes,
        prefill_flop=prefill_flop,
        decode_flop=decode_flop,
        kv_heads=_kv_heads(text.get),
        embedding_bytes=0 if text.get("tie_word_embeddings") else head_bytes,
        weight_bytes=weight_bytes,
        expert_weight_bytes=expert_weight_bytes,
        window=number(text.get, "sliding_window"),
        window_layers=_window_layers(text),
        stored_expert_bytes=expert_numbers * (stored_bytes or expert_weight_bytes or weight_bytes),
    )


def _window_layers(text: Mapping[str, Any]) -> int:
    """Return how many layers attend a window: those that layer_types names, in the form of gpt-oss."""
    return list(text.get("layer_types") or ()).count("sliding_attention") if text.get("sliding_window") else 0


def _kv_heads(value: Value) -> int:
    heads = number(value, "num_attention_heads", "n_head", default=1)
    return 1 if number(value, "kv_lora_rank") else number(value, "num_key_value_heads", default=heads)


def _attention_weights(value: Value, shape: ModelShape) -> int:
    """Return how many numbers the weights of a layer's attention have."""
    latent = number(value, "kv_lora_rank")
    if not latent:
        return shape.hidden * shape.attention_width
    heads, rotated = number(value, "num_attention_heads"), number(value, "qk_rope_head_dim")
    plain, value_dim = number(value, "qk_nope_head_dim"), number(value, "v_head_dim")
    query = heads * (plain + rotated)
    queries = number(value, "q_lora_rank")
    of_queries = queries * (shape.hidden + query) if queries else shape.hidden * query
    of_latent = shape.hidden * (latent + rotated) + latent * heads * (plain + value_dim)
    return of_queries + of_latent + heads * value_dim * shape.hidden


def _attention_flop(value: Value) -> tuple[int, int]:
    """Return a layer's operations for a row and one token that it looks at: in prefill, and in decode.

    Latent attention computes keys and values from the latent rows in prefill, and works on the latent rows in decode.
    """
    heads, (key_dim, value_dim) = number(value, "num_attention_heads", "n_head", default=1), head_dims(value)
    latent = number(value, "kv_lora_rank")
    if not latent:
        return (2 * heads * (key_dim + value_dim),) * 2
    rotated = number(value, "qk_rope_head_dim")
    whole = number(value, "qk_nope_head_dim") + rotated + value_dim
    return 2 * heads * whole, 2 * heads * (2 * latent + rotated)
