"""The memory that a candidate leaves for streamed experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_batch.checkpoint.files import StoredTensor
from sgl_batch.checkpoint.tensors import ModelTensor
from sgl_batch.config import from_mapping
from sgl_batch.core.supported_models import CPU, GPU
from sgl_batch.planner.candidate import DEVICE, INCLUSIVE, Candidate
from sgl_batch.planner.candidate_memory import CandidateMemory
from sgl_batch.planner.needs import Model, Target

LAYERS, EXPERTS, EXPERT_BYTES = 8, 16, 8 << 20
CONFIG = {
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 1024,
}
PAGE_BYTES = 64 * LAYERS * 2 * 64 * 2


def model() -> Model:
    shape = (1024, EXPERT_BYTES // 2048)
    stored = StoredTensor(file=Path("one"), dtype="BF16", shape=shape, begin=0, num_bytes=EXPERT_BYTES)
    names = [f"model.layers.{layer}.mlp.experts.{e}.up_proj.weight" for layer in range(LAYERS) for e in range(EXPERTS)]
    return Model(config=CONFIG, tensors=[ModelTensor(name, stored) for name in names], dtype="bfloat16")


def experts_of(kv=DEVICE, device=CPU, budget=4 << 30, most=0, weights="streamed", **settings):
    target = Target(device=device, budget=budget, page_size=64, length=256, most=most)
    base = from_mapping({"weights": weights, "b_moe_prefill": 256, "b_moe_decode": 8, **settings})
    candidate = Candidate(
        b_attn_prefill=256, b_moe_prefill=256, b_attn_decode=8, b_moe_decode=8, kv=kv, weights=weights
    )
    return CandidateMemory(model=model(), target=target, base=base)(candidate).room.experts


def test_resident_weights_have_no_memory_of_their_own():
    assert experts_of(weights="resident") is None


def test_experts_have_what_the_budget_leaves_beside_a_pass_and_pages_that_are_written():
    room = experts_of(budget=2 << 30)
    assert (room.slot_bytes, room.layers, room.experts) == (EXPERT_BYTES, LAYERS, EXPERTS)
    # A huge page holds keys, or values, of a layer.
    assert room.stride == (2 << 20) // (PAGE_BYTES // LAYERS // 2)
    assert room.kept_share(decode=True, pages=0) == 1.0
    shares = [
        room.kept_share(decode=True, pages=pages) for pages in (1, room.stride, 2 * room.stride, 40 * room.stride)
    ]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == shares[1] > shares[-1] == 0.0


def test_without_a_budget_experts_take_what_the_machine_has_left():
    small, large = experts_of(budget=1 << 30), experts_of(budget=1 << 30, most=3 << 30)
    assert large.decode - small.decode == 2 << 30


@pytest.mark.parametrize("device", [CPU, GPU])
def test_a_size_that_is_given_is_the_experts_own(device):
    room = experts_of(device=device, weight_memory=(2 * EXPERTS + 12) * EXPERT_BYTES)
    assert room.kept_share(decode=False, pages=0) == room.kept_share(decode=True, pages=10_000) == 2 / EXPERTS


def test_on_a_gpu_two_layers_pass_through_and_none_stay():
    assert experts_of(device=GPU, budget=16 << 30).kept_share(decode=True, pages=0) == 0.0


def test_with_a_store_all_pages_of_the_device_count_as_written(tmp_path: Path):
    alone, stored = experts_of(), experts_of(kv=INCLUSIVE, kv_store_bytes=64 << 20)
    in_a_file = experts_of(kv=INCLUSIVE, kv_store_bytes=64 << 20, kv_store_dir=str(tmp_path))
    assert stored.decode - (64 << 20) == in_a_file.decode < alone.decode - (1 << 30)
    assert (stored.page_bytes, in_a_file.page_bytes) == (PAGE_BYTES, 0)
