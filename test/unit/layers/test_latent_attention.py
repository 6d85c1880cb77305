"""Latent attention in the latent's space equals attention over keys and values brought out of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sgl_batch.kernel_loader import native_kernels
from sgl_batch.layers import latent_attention
from sgl_batch.layers.packed_weights import PackedWeights

HIDDEN, HEADS, NOPE, ROPE, VALUE, RANK, Q_RANK, TOKENS = 24, 3, 10, 4, 6, 8, 12, 9


class Linear:
    """As SGLang's: the product, and no bias to add."""

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype) -> None:
        self.weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x @ self.weight.T, None


def rotated(positions: torch.Tensor, *heads: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Some turn by position, as a rotary embedding would: the same for queries and keys."""
    turn = (positions + 1).to(heads[0].dtype)[:, None, None]
    return tuple(head * turn.cos() + head.roll(1, -1) * turn.sin() for head in heads)


def causal(q_THD: torch.Tensor, k_THD: torch.Tensor, v_THV: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("qhd,khd->hqk", q_THD, k_THD) * (NOPE + ROPE) ** -0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khv->qhv", scores.masked_fill(hidden, float("-inf")).softmax(-1), v_THV)


def module_of(*, q_rank: int | None, dtype: torch.dtype) -> SimpleNamespace:
    """The part of SGLang's module that `run` uses, over plain products; `kv_b` projects latents to keys and values."""
    torch.manual_seed(0)
    kv_b = Linear(HEADS * (NOPE + VALUE), RANK, dtype)
    by_head = kv_b.weight.view(HEADS, NOPE + VALUE, RANK)
    fields = {
        "q_lora_rank": q_rank,
        "kv_lora_rank": RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "qk_head_dim": NOPE + ROPE,
        "v_head_dim": VALUE,
        "num_local_heads": HEADS,
        "kv_b": kv_b,
        "w_kc": by_head[:, :NOPE].transpose(1, 2).contiguous().transpose(1, 2),
        "w_vc": by_head[:, NOPE:].contiguous().transpose(1, 2),
        "kv_a_layernorm": lambda x: x / 2,
        "q_a_layernorm": lambda x: x / 3,
        "rotary_emb": rotated,
        "o_proj": Linear(HIDDEN, HEADS * VALUE, dtype),
        "attn_mqa": lambda q, k, v, _: causal(q, k.expand(-1, HEADS, -1), v.expand(-1, HEADS, -1)).flatten(1),
    }
    if q_rank is None:
        fields["q_proj"] = Linear(HEADS * (NOPE + ROPE), HIDDEN, dtype)
        fields["kv_a_proj_with_mqa"] = Linear(RANK + ROPE, HIDDEN, dtype)
    else:
        fields["fused_qkv_a_proj_with_mqa"] = Linear(q_rank + RANK + ROPE, HIDDEN, dtype)
        fields["q_b_proj"] = Linear(HEADS * (NOPE + ROPE), q_rank, dtype)
    return SimpleNamespace(**fields)


def expanded(module: SimpleNamespace, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """The definition (DeepSeek-V2, equations 9 to 19): a key and a value for each head and token."""
    if module.q_lora_rank is None:
        q, both = module.q_proj(hidden)[0], module.kv_a_proj_with_mqa(hidden)[0]
    else:
        low, both = module.fused_qkv_a_proj_with_mqa(hidden)[0].split([module.q_lora_rank, RANK + ROPE], -1)
        q = module.q_b_proj(low / 3)[0]
    q_nope, q_rope = q.view(TOKENS, HEADS, -1).split([NOPE, ROPE], -1)
    k_nope, values = module.kv_b(both[:, :RANK] / 2)[0].view(TOKENS, HEADS, -1).split([NOPE, VALUE], -1)
    q_rope, k_rope = rotated(positions, q_rope, both[:, None, RANK:])
    queries, keys = torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, k_rope.expand(-1, HEADS, -1)), -1)
    return module.o_proj(causal(queries, keys, values).flatten(1))[0]


@pytest.mark.parametrize("q_rank", [None, Q_RANK])
@pytest.mark.parametrize("operators", ["native", "torch"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=str)
def test_attention_over_latents_equals_attention_over_expanded_keys_and_values(dtype, tolerance, operators, q_rank):
    module = module_of(q_rank=q_rank, dtype=dtype)
    hidden, positions = torch.randn(TOKENS, HIDDEN).to(dtype), torch.arange(TOKENS)
    expected = expanded(module_of(q_rank=q_rank, dtype=dtype), positions, hidden)
    weights = PackedWeights(native_kernels() if operators == "native" else None)
    latent_attention.pack(module, weights)
    assert len(weights) == (2 if operators == "native" else 0)
    found = latent_attention.run(module, weights, positions, hidden, None)
    assert found.dtype == dtype
    assert torch.allclose(found.double(), expected.double(), rtol=tolerance, atol=tolerance)
