"""Each family's halves call its layer's own modules in the order of its own forward."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sgl_batch.model_executor.families import (
    FAMILIES,
    DeepseekFamily,
    ExpertBlock,
    LlamaFamily,
    MinimaxM2Family,
    MixtralFamily,
    Qwen2MoeFamily,
    Qwen3Family,
    Qwen3MoeFamily,
    family_of,
)


class Notes:
    """Modules that answer with what they were asked, as text: name(arguments)."""

    def one(self, name: str):
        return lambda *args, **kwargs: f"{name}({', '.join([*map(str, args), *map(str, kwargs.values())])})"

    def two(self, name: str):
        return lambda *args: (f"{name}({', '.join(map(str, args))})", f"{name}.residual")

    def norm(self, name: str):
        """SGLang's norm: of one argument the normed, of two the normed sum and the sum."""
        return lambda *args: self.one(name)(*args) if len(args) == 1 else self.two(name)(*args)


NOTES = Notes()


def mixtral_layer() -> SimpleNamespace:
    return SimpleNamespace(
        input_layernorm=NOTES.norm("norm_1"),
        self_attn=NOTES.one("attention"),
        post_attention_layernorm=NOTES.norm("norm_2"),
        block_sparse_moe=NOTES.one("moe"),
    )


def qwen3_layer() -> SimpleNamespace:
    return SimpleNamespace(
        layer_communicator=SimpleNamespace(
            prepare_attn=NOTES.two("before_attention"),
            prepare_mlp=NOTES.two("before_mlp"),
            postprocess_layer=NOTES.two("after_layer"),
        ),
        self_attn=NOTES.one("attention"),
        mlp=NOTES.one("moe"),
    )


def test_mixtrals_first_layer_begins_the_residual_with_the_embedding():
    hidden, residual = MixtralFamily().attention_half(mixtral_layer(), "positions", "hidden", None, "batch")
    assert hidden == "norm_2(attention(positions, norm_1(hidden), batch), hidden)"
    assert residual == "norm_2.residual"


def test_mixtrals_other_layers_add_to_the_residual():
    hidden, _ = MixtralFamily().attention_half(mixtral_layer(), "positions", "hidden", "residual", "batch")
    assert hidden == "norm_2(attention(positions, norm_1(hidden, residual), batch), norm_1.residual)"


def test_mixtrals_experts_leave_the_residual_to_the_next_norm():
    family, layer = MixtralFamily(), mixtral_layer()
    assert family.expert_half(layer, "hidden", "batch") == "moe(hidden)"
    assert family.finish_layer(layer, "hidden", "residual", "batch") == ("hidden", "residual")


@pytest.mark.parametrize("residual", [None, "residual"])
def test_qwen3s_halves_go_through_the_layer_communicator(residual):
    family, layer = Qwen3MoeFamily(), qwen3_layer()
    hidden, out = family.attention_half(layer, "positions", "hidden", residual, "batch")
    attention = f"attention(positions, before_attention(hidden, {residual}, batch), batch)"
    assert hidden == f"before_mlp({attention}, before_attention.residual, batch)"
    assert out == "before_mlp.residual"
    assert family.expert_half(layer, "hidden", "batch") == "moe(hidden, batch)"
    assert family.finish_layer(layer, "h", "r", "batch") == ("after_layer(h, r, batch)", "after_layer.residual")


def test_deepseeks_attention_reads_the_normed_rows_and_drops_them(monkeypatch):
    layer, hidden = qwen3_layer(), torch.zeros(2, 3)
    layer.layer_communicator.prepare_attn = lambda hidden, residual, batch: (hidden, residual)
    layer.self_attn = lambda **given: f"attention({', '.join(sorted(given))})"
    forgotten = []
    monkeypatch.setattr(
        "sgl_batch.model_executor.families.deepseek.clear_attention_inputs", lambda: forgotten.append("inputs")
    )
    found, residual = DeepseekFamily().attention_half(layer, "positions", hidden, "residual", "batch")
    attention = "attention(forward_batch, hidden_states, positions, zero_allocator)"
    assert found == f"before_mlp({attention}, residual, batch)"
    assert residual == "before_mlp.residual"
    assert forgotten == ["inputs"]


def test_deepseeks_first_layers_are_dense_and_its_others_share_experts():
    family = DeepseekFamily()
    assert family.expert_block(SimpleNamespace(mlp=SimpleNamespace())) is None
    parts = {name: NOTES.one(name) for name in ("topk", "experts", "shared_experts")}
    gate = SimpleNamespace(weight=torch.zeros(1))
    block = family.expert_block(SimpleNamespace(mlp=SimpleNamespace(gate=gate, routed_scaling_factor=2.5, **parts)))
    assert block is not None
    assert (block.gate, block.experts, block.shared) == (gate, parts["experts"], parts["shared_experts"])
    assert block.scale == 2.5


def test_qwen2s_shared_expert_is_weighted_by_the_sigmoid_of_its_gate():
    parts = {name: NOTES.one(name) for name in ("gate", "topk", "experts")}
    moe = SimpleNamespace(
        shared_expert=lambda hidden: 10 * hidden, shared_expert_gate=lambda hidden: hidden[:, :1], **parts
    )
    block = Qwen2MoeFamily().expert_block(SimpleNamespace(mlp=moe))
    assert block is not None
    assert block.shared is not None
    assert block.shared(torch.tensor([[0.0, 2.0]])).tolist() == [[0.0, 10.0]]
    moe.shared_expert = None
    block = Qwen2MoeFamily().expert_block(SimpleNamespace(mlp=moe))
    assert block is not None
    assert block.shared is None


def test_minimaxs_router_takes_rows_in_float32():
    chosen = SimpleNamespace(topk_weights=torch.ones(1, 1), topk_ids=torch.zeros(1, 1))
    asked = []
    moe = SimpleNamespace(
        gate=lambda hidden: asked.append(hidden.dtype), topk=lambda hidden, _: asked.append(hidden.dtype) or chosen
    )
    moe.experts = NOTES.one("experts")
    block = MinimaxM2Family().expert_block(SimpleNamespace(block_sparse_moe=moe))
    assert block is not None
    block.route(torch.zeros(1, 4, dtype=torch.bfloat16))
    assert asked == [torch.float32, torch.bfloat16]


def test_dense_families_run_attention_and_an_mlp():
    plain = SimpleNamespace(**{**vars(mixtral_layer()), "mlp": NOTES.one("mlp")})
    assert LlamaFamily().attention_half(plain, "positions", "hidden", None, "batch")[0] == (
        "norm_2(attention(positions, norm_1(hidden), batch), hidden)"
    )
    assert LlamaFamily().expert_half(plain, "hidden", "batch") == "mlp(hidden)"
    assert Qwen3Family().attention_half(qwen3_layer(), "positions", "hidden", "residual", "batch")[0] == (
        "before_mlp(attention(positions, before_attention(hidden, residual, batch), batch), "
        "before_attention.residual, batch)"
    )
    for family, layer in ((LlamaFamily(), plain), (Qwen3Family(), SimpleNamespace(mlp=SimpleNamespace()))):
        assert family.dense
        assert family.expert_block(layer) is None


def test_weights_of_a_choice_are_scaled_by_the_block():
    chosen = SimpleNamespace(topk_weights=torch.tensor([[0.5, 0.25]]), topk_ids=torch.tensor([[3, 1]]))
    for gate in (lambda hidden: "logits", lambda hidden: ("logits", None)):
        asked = []
        block = ExpertBlock(
            gate=gate, topk=lambda hidden, logits, asked=asked: asked.append(logits) or chosen, experts=None, scale=2.0
        )
        weights, ids = block.route(torch.zeros(1, 4))
        assert asked == ["logits"]
        assert weights.tolist() == [[1.0, 0.5]]
        assert (ids.tolist(), ids.dtype) == ([[3, 1]], torch.int32)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.architectures[0])
def test_a_model_is_known_by_the_name_of_its_class(family):
    for name in family.architectures:
        assert family_of(type(name, (), {})()) is family


def test_an_unknown_model_has_no_family():
    assert family_of(SimpleNamespace()) is None


def test_no_architecture_belongs_to_two_families():
    names = [name for family in FAMILIES for name in family.architectures]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.architectures[0])
def test_a_process_runs_the_layers_that_it_holds_between_embedding_and_last_norm(family):
    body = SimpleNamespace(
        layers="abcdef", start_layer=1, end_layer=4, embed_tokens=NOTES.one("embed"), norm=NOTES.norm("norm")
    )
    model = SimpleNamespace(model=body)
    assert list(family.layers(model)) == ["b", "c", "d"]
    assert family.embed(model, "ids") == "embed(ids)"
    assert family.final_norm(model, "hidden", "residual") == "norm(hidden, residual)"
