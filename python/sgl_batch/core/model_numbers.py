"""Reads from a model's configuration the numbers that memory depends on.

In all functions `value` returns the value of a name in the configuration, or None. Families name the same number
differently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_batch.core.device_budget import ModelShape

Value = Callable[[str], Any]

# Parts of the names of weights that int8 never rounds: routers and embeddings choose experts and tokens.
KEPT_EXACT = ("embed_tokens", "lm_head", ".gate.", ".router.", "_bias")
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# The width that SGLang counts for a key head in latent attention.
_LATENT_HEAD_DIM = 256


def number(value: Value, *names: str, default: int = 0) -> int:
    """Return the first of these numbers that the configuration has."""
    return next((int(found) for name in names if (found := value(name))), default)


def head_dims(value: Value) -> tuple[int, int]:
    """Return the channels of a head's key and of its value, as attention computes them."""
    if number(value, "kv_lora_rank"):
        return _LATENT_HEAD_DIM, number(value, "v_head_dim")
    heads = number(value, "num_attention_heads", "n_head", default=1)
    plain = number(value, "head_dim", default=number(value, "hidden_size", "n_embd") // heads)
    return plain, number(value, "v_head_dim", default=plain)


def shape_of(value: Value, *, hidden: int, vocabulary: int, layers: int, head_dim: int, item_bytes: int) -> ModelShape:
    """Return the shape that working memory depends on; numbers that the configuration does not have count as 0."""
    heads = number(value, "num_attention_heads")
    kv_heads = number(value, "num_key_value_heads", default=heads)
    latent = number(value, "kv_lora_rank")
    # Latent attention: queries absorbed into the latent space, and the result before values are computed from it.
    attention = heads * (2 * head_dim + 2 * latent) if latent else (2 * heads + 2 * kv_heads) * head_dim
    inter = number(value, "intermediate_size")
    experts = number(value, *NUM_EXPERTS)
    expert_width = number(value, "moe_intermediate_size", default=inter)
    shared = number(value, "shared_expert_intermediate_size", default=number(value, "n_shared_experts") * expert_width)
    # Only a configuration that says so has experts in every layer; others may have dense layers too.
    all_sparse = value("decoder_sparse_step") == 1 and value("mlp_only_layers") == []
    return ModelShape(
        hidden=hidden,
        vocabulary=vocabulary,
        layers=layers,
        attention_width=attention,
        experts=experts,
        top_k=number(value, "num_experts_per_tok"),
        expert_width=expert_width,
        dense_width=shared if experts and all_sparse else max(inter, shared),
        item_bytes=item_bytes,
    )


def kv_token_bytes(value: Value, item_bytes: int) -> int:
    """Return the bytes of a token's KV in all layers."""
    latent = number(value, "kv_lora_rank")
    if latent:
        row = latent + number(value, "qk_rope_head_dim")
    else:
        heads = number(value, "num_attention_heads", "n_head")
        row = number(value, "num_key_value_heads", default=heads) * sum(head_dims(value))
    return number(value, "num_hidden_layers", "n_layer") * row * item_bytes
