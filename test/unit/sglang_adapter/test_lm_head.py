"""The output projection uses our product if it has a weight of its own; otherwise it stays SGLang's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sgl_batch.sglang_adapter.layers import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
    replace_lm_head,
)


class Head(ParallelLMHead):
    """SGLang's class with a weight alone: its own start asks for process groups."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        torch.nn.Module.__init__(self)
        self.weight, self.quant_method = weight, UnquantizedEmbeddingMethod()


class Embedding(VocabParallelEmbedding):
    """Likewise."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        torch.nn.Module.__init__(self)
        self.weight, self.quant_method = weight, UnquantizedEmbeddingMethod()


class Model(torch.nn.Module):
    """`tied`: the head's weight is that of a layer of torch's."""

    def __init__(self, *, tied: bool = False, fp32: bool = False) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4)
        weight = self.embed.weight if tied else torch.nn.Parameter(torch.randn(8, 4))
        self.lm_head = Head(weight)
        self.logits_processor = SimpleNamespace(use_fp32_lm_head=fp32)


def doubled(x, weight, bias=None):
    return 2 * x @ weight.T


def negative(ids, weight):
    return -weight[ids]


def test_sglang_computes_logits_with_our_product():
    from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method

    model = Model()
    head = replace_lm_head(model, doubled, negative)
    x = torch.randn(3, 4)
    assert head is model.lm_head
    assert should_apply_lm_head_quant_method(head, head.quant_method)
    assert torch.equal(head.quant_method.apply(head, x), doubled(x, head.weight))


@pytest.mark.parametrize("same", [True, False])
def test_an_embedding_of_the_same_weight_is_looked_up_by_ours(same):
    model = Model()
    model.embed = Embedding(model.lm_head.weight)
    if same:  # SGLang's models of Qwen2 and Qwen3; others have a head of their own with the embedding's weight
        model.lm_head = model.embed
    head = replace_lm_head(model, doubled, negative)
    x, ids = torch.randn(3, 4), torch.tensor([5, 0])
    assert head is model.lm_head
    assert torch.equal(head.quant_method.apply(head, x), doubled(x, head.weight))
    assert torch.equal(model.embed.quant_method.embedding(model.embed, ids), -head.weight[ids])


@pytest.mark.parametrize("kind", [{"tied": True}, {"fp32": True}], ids=str)
def test_a_weight_with_another_use_stays_as_it_is(kind):
    model = Model(**kind)
    assert replace_lm_head(model, doubled, negative) is None
    assert type(model.lm_head.quant_method) is UnquantizedEmbeddingMethod


def test_a_model_without_an_output_projection_is_left_alone():
    assert replace_lm_head(torch.nn.Linear(2, 2), doubled, negative) is None
