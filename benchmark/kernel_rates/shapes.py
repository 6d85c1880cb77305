"""Owns the sizes of the measured model, read from a checkpoint's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from comparison.workload import model_config

from sgl_batch.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Sizes of one layer, and of the vocabulary. The defaults are those of `benchmark/offline.py --make-model`."""

    hidden: int = 1024
    inter: int = 384
    experts: int = 64
    top_k: int = 8
    q_heads: int = 16
    kv_heads: int = 4
    head_dim: int = 64
    vocabulary: int = 32000

    @property
    def expert_elements(self) -> int:
        """Weights of one expert: gate, up and down."""
        return 3 * self.inter * self.hidden


_NAMES = {
    "hidden": "hidden_size",
    "inter": "moe_intermediate_size",
    "experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "q_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocabulary": "vocab_size",
}


def shapes_of(model: Path | None) -> Shapes:
    """Read the sizes in a checkpoint's config.json; without one, the defaults. Raises ConfigError."""
    if model is None:
        return Shapes()
    config = model_config(model)
    if config.get("kv_lora_rank"):
        raise ConfigError(f"{model}/config.json is of latent attention, whose kernels are not measured: name another")
    missing = [theirs for theirs in _NAMES.values() if theirs not in config]
    if missing:
        raise ConfigError(
            f"{model}/config.json has no {missing[0]}; name a checkpoint with experts, or leave out --model"
        )
    return Shapes(**{ours: int(config[theirs]) for ours, theirs in _NAMES.items()})
