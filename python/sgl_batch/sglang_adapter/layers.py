"""SGLang's layer classes and registries, as our layers room builds on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_batch.sglang_adapter import bootstrap

bootstrap.prepare()

from sglang.srt.constrained.base_grammar_backend import register_grammar_backend  # noqa: E402
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar, XGrammarGrammarBackend  # noqa: E402
from sglang.srt.layers.attention.attention_registry import register_attention_backend  # noqa: E402
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend  # noqa: E402
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput  # noqa: E402
from sglang.srt.layers.moe.topk import TopK  # noqa: E402
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod  # noqa: E402
from sglang.srt.layers.sampler import Sampler, register_sampler_backend  # noqa: E402
from sglang.srt.layers.utils.multi_platform import MultiPlatformOp  # noqa: E402
from sglang.srt.sampling.sampling_params import TOP_K_ALL  # noqa: E402

__all__ = [
    "TOP_K_ALL",
    "AttentionBackend",
    "Sampler",
    "StandardCombineInput",
    "TopK",
    "UnquantizedFusedMoEMethod",
    "XGrammarGrammar",
    "XGrammarGrammarBackend",
    "register_attention_backend",
    "register_forward",
    "register_grammar_backend",
    "register_sampler_backend",
]


def register_forward(op_class: Any, forward: Callable[..., Any], dispatch_key: str) -> None:
    """Put `forward` under SGLang's layer `op_class` on the platform whose dispatch key is given."""
    MultiPlatformOp.register_oot_forward(op_class, forward, dispatch_key)
