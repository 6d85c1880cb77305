"""Decides which configs SGLang's own models cannot read, because transformers writes them in a form of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Fields that SGLang's models read, and that transformers' configs of these models do not have.
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "HunYuanMoEV1ForCausalLM": ("moe_intermediate_size", "use_mixed_mlp_moe", "use_qk_norm"),
    "HunYuanDenseV1ForCausalLM": ("use_qk_norm",),
    "HYV3ForCausalLM": ("route_norm",),
}
# The fields that SGLang's DbrxConfig takes in its two parts. Any other one is an error.
_DBRX = "DbrxForCausalLM"
_DBRX_PARTS: Mapping[str, tuple[str, ...]] = {
    "attn_config": ("attn_pdrop", "clip_qkv", "kv_n_heads", "model_type", "rope_theta"),
    "ffn_config": (
        "ffn_act_fn",
        "ffn_hidden_size",
        "model_type",
        "moe_jitter_eps",
        "moe_loss_weight",
        "moe_normalize_expert_weights",
        "moe_num_experts",
        "moe_top_k",
        "uniform_expert_assignment",
    ),
}


def unreadable(architecture: str, parts: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why SGLang's model cannot read a config, as the end of a sentence, or None.

    `parts`: the whole config first, then its parts that describe the text model.
    """
    missing = [name for name in _NEEDED.get(architecture, ()) if not any(name in part for part in parts)]
    if missing:
        return (
            f"its config is in transformers' form and lacks {', '.join(missing)}, which SGLang's model reads: set this "
            "in config.json or with --json-model-override-args, as in the model's original config"
        )
    if architecture != _DBRX:
        return None
    for part, known in _DBRX_PARTS.items():
        inner = parts[0].get(part)
        unknown = sorted(set(inner) - set(known)) if isinstance(inner, Mapping) else []
        if unknown:
            return f"its {part} has {', '.join(map(str, unknown))}, which SGLang's reader of it refuses: remove this"
    return None
