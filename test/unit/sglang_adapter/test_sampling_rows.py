"""What rows of a batch ask for is known on the host, also when rows leave or join; grammars mask their own rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from sgl_batch.layers.cpu_grammar import CpuGrammar
from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.sampling_rows import keep_rows_on_host

with bootstrap.importing():
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from xgrammar import CompiledGrammar, GrammarCompiler, GrammarMatcher, TokenizerInfo


def batch_of(*asked: tuple[int, float, float]) -> Any:
    """A batch whose requests ask for these top_k, top_p and min_p."""
    top_ks, top_ps, min_ps = (torch.tensor(column) for column in zip(*asked, strict=True))
    info = SamplingBatchInfo(
        temperatures=torch.ones(len(asked), 1),
        top_ks=top_ks,
        top_ps=top_ps,
        min_ps=min_ps,
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_p_sampling=True,
        need_top_k_sampling=True,
        need_min_p_sampling=True,
        vocab_size=10,
        penalizer_orchestrator=SimpleNamespace(filter=lambda rows: None, merge=lambda other: None),
    )
    parameters = [SimpleNamespace(top_k=top_k, top_p=top_p, min_p=min_p) for top_k, top_p, min_p in asked]
    batch = SimpleNamespace(sampling_info=info, reqs=[SimpleNamespace(sampling_params=one) for one in parameters])
    keep_rows_on_host(batch)
    return batch


def test_rows_follow_those_on_the_device_when_some_leave_and_others_join() -> None:
    info = batch_of((1, 1.0, 0.0), (40, 0.5, 0.0), (7, 1.0, 0.25)).sampling_info
    info.groups = ["of these rows"]
    info.filter_batch([2, 0], torch.tensor([2, 0]))
    assert info.groups is None
    info.groups = ["of those that stay"]
    info.merge_batch(batch_of((5, 0.75, 0.5)).sampling_info)
    assert info.groups is None
    assert [tuple(row) for row in info.rows] == [(7, 1.0, 0.25), (1, 1.0, 0.0), (5, 0.75, 0.5)]
    assert [list(one) for one in (info.top_ks, info.top_ps, info.min_ps)] == [[7, 1, 5], [1, 1, 0.75], [0.25, 0, 0.5]]


@pytest.fixture(scope="module")
def digits(repo_root: Any) -> CompiledGrammar:
    """A grammar of one or more digits and a full stop."""
    tokenizer = AutoTokenizer.from_pretrained(repo_root / "test" / "models" / "tiny-qwen3-moe")
    return GrammarCompiler(TokenizerInfo.from_huggingface(tokenizer)).compile_regex(r"[0-9]+\.")


def grammar_after(compiled: CompiledGrammar, text: str) -> CpuGrammar:
    grammar = CpuGrammar(GrammarMatcher(compiled), compiled.tokenizer_info.vocab_size, compiled, None)
    assert grammar.matcher.accept_string(text)
    return grammar


class OtherGrammar(BaseGrammarObject):  # type: ignore[misc]
    """A grammar that is not xgrammar's own, as of a model that thinks first: it fills its row by itself."""

    def __init__(self, within: CpuGrammar) -> None:
        super().__init__()
        self._within = within

    def is_terminated(self) -> bool:
        return False

    def fill_vocab_mask(self, vocab_mask: torch.Tensor, idx: int) -> None:
        self._within.fill_vocab_mask(vocab_mask, idx)


@pytest.mark.parametrize("other", [False, True], ids=["xgrammar's alone", "one of another kind"])
def test_each_row_gets_the_mask_of_its_own_grammar(digits: CompiledGrammar, other: bool) -> None:
    rows: list[Any] = [grammar_after(digits, text) for text in ("", "12", "7.", "3", "", "")]
    assert rows[2].matcher.accept_token(digits.tokenizer_info.stop_token_ids[0])
    rows[3].finished = True
    rows[4] = None
    if other:
        rows[5] = OtherGrammar(rows[5])
    info = batch_of(*[(40, 1.0, 0.0)] * len(rows)).sampling_info
    info.grammars, info.vocab_size, info.device = rows, digits.tokenizer_info.vocab_size, "cpu"
    info.update_regex_vocab_mask()
    found = info.vocab_mask.clone()
    SamplingBatchInfo.update_regex_vocab_mask(info)
    assert torch.equal(found, info.vocab_mask)
    free = torch.full_like(found[0], -1)
    assert [torch.equal(row, free) for row in found] == [False, False, True, True, True, False]
    assert not torch.equal(found[0], found[1]), "a full stop is allowed behind a digit alone"
    logits = torch.zeros(len(rows), info.vocab_size)
    info.apply_mask_func(logits=logits, vocab_mask=found)
    assert [bool((row == 0).all()) for row in logits] == [False, False, True, True, True, False]


def test_rows_without_grammars_have_no_mask() -> None:
    info = batch_of((40, 1.0, 0.0), (40, 1.0, 0.0)).sampling_info
    info.vocab_mask = torch.zeros(2, 1)
    info.update_regex_vocab_mask()
    assert info.vocab_mask is None
