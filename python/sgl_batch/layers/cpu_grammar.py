"""Owns grammar masks on a CPU: SGLang's xgrammar backend with our kernel, or without it xgrammar's CPU operator."""

from __future__ import annotations

from typing import Any

import torch

from sgl_batch.kernel_loader import native_kernels
from sgl_batch.sglang_adapter.layers import (
    XGrammarGrammar,
    XGrammarGrammarBackend,
    apply_token_bitmask_inplace,
    register_grammar_backend,
)
from sgl_batch.sglang_adapter.names import CPU_GRAMMAR


def apply_mask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    """Set logits [B, vocab] to minus infinity whose bits in `vocab_mask`, int32 [B, vocab / 32], are not set."""
    kernels = native_kernels()
    apply = apply_token_bitmask_inplace if kernels is None else kernels.mask_tokens
    apply(logits, vocab_mask)


class CpuGrammar(XGrammarGrammar):  # type: ignore[misc]
    """One sequence's grammar state. SGLang's own class refuses logits on a CPU."""

    def apply_vocab_mask(self, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
        apply_mask(logits, vocab_mask)

    def copy(self) -> CpuGrammar:
        return _as_cpu(super().copy())


def _as_cpu(grammar: Any) -> CpuGrammar:
    return CpuGrammar(
        grammar.matcher,
        grammar.vocab_size,
        grammar.ctx,
        grammar.override_stop_tokens,
        grammar.key_string,
        grammar.grammar_stats,
    )


class CpuGrammarBackend(XGrammarGrammarBackend):  # type: ignore[misc]
    """Compiles JSON schemas, regular expressions and grammars, and applies them on the CPU."""

    @staticmethod
    def apply_vocab_mask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
        apply_mask(logits, vocab_mask)

    def _from_context(self, ctx: Any, key_string: str, grammar_stats: Any) -> CpuGrammar:
        return _as_cpu(super()._from_context(ctx, key_string, grammar_stats))


def _create(server_args: Any, tokenizer: Any, vocab_size: int, eos_token_ids: set[int] | None) -> Any:
    return CpuGrammarBackend(
        tokenizer,
        vocab_size=vocab_size,
        model_eos_token_ids=list(eos_token_ids) if eos_token_ids else None,
        any_whitespace=not server_args.constrained_json_disable_any_whitespace,
    )


def register() -> None:
    """Register the backend with SGLang in this process."""
    register_grammar_backend(CPU_GRAMMAR, _create)
