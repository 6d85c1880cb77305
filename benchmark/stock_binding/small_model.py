"""Owns a small random dense model, whose steps take milliseconds on one core: large enough that each row counts."""

from __future__ import annotations

from pathlib import Path

from sgl_batch.sglang_adapter import bootstrap

VOCABULARY = 8192


def write_small_model(directory: Path) -> None:
    """Write a random Qwen3 checkpoint of 24 million parameters in bfloat16, without a tokenizer."""
    bootstrap.prepare()
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=512,
        num_hidden_layers=6,
        intermediate_size=1536,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
