"""A request that is written down and rebuilt in another scheduler process goes on as if it had stayed."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from sgl_batch.layers import cpu_grammar
from sgl_batch.model_executor.expert_choices import ExpertChoices
from sgl_batch.sglang_adapter import bootstrap, expert_choice, moving
from sgl_batch.sglang_adapter.moving_grammars import ArrivingGrammars

with bootstrap.importing():
    from sglang.srt.constrained.grammar_manager import GrammarManager
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams
    from transformers import AutoTokenizer

PROMPT = [5, 6, 7, 8]
TOKENS = [11, 12, 13]


def new_request(sampling: dict[str, Any] | None = None, **asked: Any) -> Any:
    """Return a request that has generated TOKENS."""
    request = Req("r1", "", array("q", PROMPT), SamplingParams(**(sampling or {})), vocab_size=512, **asked)
    request.output_ids = array("q", TOKENS)
    request.logprob_start_len = -1
    return request


def moved(request: Any, scheduler: Any = None) -> Any:
    """Return the request as it is rebuilt from what is sent."""
    written = {"sampling": moving.sampling_of(request), "progress": moving.progress_of(request)}
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(written))
    known = SimpleNamespace(model_config=SimpleNamespace(hf_eos_token_id={0}, vocab_size=512), tokenizer=None)
    return moving.rebuild(
        scheduler or known,
        rid=request.rid,
        prompt_tokens=list(request.origin_input_ids),
        generated_tokens=list(request.output_ids),
        position=len(PROMPT) + len(request.output_ids) - 1,
        **received,
    )


@pytest.mark.parametrize("sent", [0, 2, 3])
def test_log_probabilities_that_were_not_sent_yet_move_with_their_places(sent: int) -> None:
    request = new_request(return_logprob=True, top_logprobs_num=2, token_ids_logprob=[7, 9])
    logprob = request.logprob
    logprob.output_token_logprobs_val, logprob.output_token_logprobs_idx = [-0.1, -1 / 3, -2.5], list(TOKENS)
    logprob.output_top_logprobs_val = [[-0.1, -3.0], [-0.2, -4.0], [-2.5, -2.6]]
    logprob.output_top_logprobs_idx = [[11, 4], [3, 12], [13, 1]]
    logprob.output_token_ids_logprobs_val = [torch.tensor([-9.0, -8.0]), [-7.0, -6.0], [-5.0, -4.0]]
    logprob.output_token_ids_logprobs_idx = [[7, 9]] * 3
    logprob.input_token_logprobs_val, logprob.input_token_logprobs_idx = [None, -1.5], [5, 6]
    request.send_output_token_logprobs_offset, request.input_logprob_sent = sent, sent > 0

    arrived = moved(request)

    assert moving.movable(request)
    assert arrived.return_logprob
    assert arrived.send_output_token_logprobs_offset == sent
    assert arrived.input_logprob_sent == (sent > 0)
    assert arrived.logprob.top_logprobs_num == 2
    assert arrived.logprob.token_ids_logprob == [7, 9]
    for kind in ("token_logprobs", "top_logprobs"):
        for name in (f"output_{kind}_val", f"output_{kind}_idx"):
            assert getattr(arrived.logprob, name)[sent:] == getattr(logprob, name)[sent:]
            assert len(getattr(arrived.logprob, name)) == 3, "the next token's has its place"
    values = [[-9.0, -8.0], [-7.0, -6.0], [-5.0, -4.0]]
    assert arrived.logprob.output_token_ids_logprobs_val[sent:] == values[sent:]
    if not sent:
        assert arrived.logprob.input_token_logprobs_val == [None, -1.5]


def test_kinds_of_log_probabilities_that_were_not_asked_for_stay_empty() -> None:
    request = new_request(return_logprob=True)
    request.logprob.output_token_logprobs_val = [-1.0, -2.0, -3.0]
    request.logprob.output_token_logprobs_idx = list(TOKENS)
    request.send_output_token_logprobs_offset = 2
    assert moved(request).logprob.output_top_logprobs_val == []


def test_a_request_that_asks_for_nothing_more_has_no_log_probabilities() -> None:
    arrived = moved(new_request())
    assert not arrived.return_logprob
    assert arrived.logprob.output_token_logprobs_val is None


def test_its_reasoning_goes_on() -> None:
    request = new_request(require_reasoning=True)
    request.update_reasoning_tokens([11, 12], think_end_id=99)
    arrived = moved(request)
    for one in (request, arrived):
        one.update_reasoning_tokens([99], think_end_id=99)
        one.update_reasoning_tokens([13], think_end_id=99)
    assert arrived.reasoning_tokens == request.reasoning_tokens == 3


def test_the_experts_that_were_chosen_for_its_tokens_move(monkeypatch: pytest.MonkeyPatch) -> None:
    def record() -> ExpertChoices:
        return ExpertChoices(num_layers=2, num_expert_layers=1, top_k=2)

    here, there = record(), record()
    current = [here]
    monkeypatch.setattr(expert_choice, "get_global_experts_capturer", lambda: current[0])
    request = new_request(return_routed_experts=True, routed_experts_start_len=1)
    request.req_pool_idx = 0
    here.capture(1, torch.arange(12).view(6, 2))
    here.on_forward_end()
    here.note([(request, 0, 6)])
    progress = moving.progress_of(request)
    assert moving.movable(request)
    current[0] = there
    monkeypatch.setattr(moving, "progress_of", lambda _: progress)
    arrived = moved(request)
    assert arrived.return_routed_experts
    assert torch.equal(there.of(arrived), here.of(request))


@pytest.fixture(scope="module")
def tokenizer(repo_root: Any) -> Any:
    return AutoTokenizer.from_pretrained(repo_root / "test" / "models" / "tiny-qwen3-moe")


def a_scheduler(tokenizer: Any) -> Any:
    """Return what grammars need of a scheduler process, with a grammar backend of its own."""
    vocab_size = len(tokenizer)
    manager = GrammarManager.__new__(GrammarManager)
    arguments = SimpleNamespace(constrained_json_disable_any_whitespace=False)
    manager.grammar_backend = cpu_grammar._create(arguments, tokenizer, vocab_size, {tokenizer.eos_token_id})
    manager.grammar_queue, manager._enable_strict_thinking = [], False
    config = SimpleNamespace(hf_eos_token_id={tokenizer.eos_token_id}, vocab_size=vocab_size)
    return SimpleNamespace(grammar_manager=manager, model_config=config, tokenizer=tokenizer)


def allowed(request: Any, vocab_size: int) -> torch.Tensor:
    """Return the mask of the tokens that a request's grammar allows next."""
    mask = request.grammar.allocate_vocab_mask(vocab_size, 1, "cpu")
    request.grammar.fill_vocab_mask(mask, 0)
    return mask


def given(grammars: ArrivingGrammars, request: Any) -> str | None:
    """Give a request its grammar as soon as it is compiled."""
    for future in list(grammars._compiling.values()):
        future.exception()
    return grammars.give(request)


def test_a_grammar_goes_on_after_the_tokens_that_it_has_accepted(tokenizer: Any) -> None:
    scheduler = a_scheduler(tokenizer)
    grammars, size = ArrivingGrammars(scheduler), scheduler.model_config.vocab_size
    sampling = {"json_schema": '{"type": "array", "items": {"type": "integer"}}'}
    request = new_request(sampling)
    request.output_ids = array("q")
    grammars.give(request)
    assert given(grammars, request) is None
    for token in tokenizer.encode("[12, 3", add_special_tokens=False):
        request.grammar.accept_token(token)
        request.output_ids.append(token)

    arrived = moved(request, scheduler)

    assert moving.movable(request)
    assert ArrivingGrammars(scheduler).give(arrived) is None, "the grammar is known here"
    assert torch.equal(allowed(arrived, size), allowed(request, size))
    arrived.grammar.accept_token(tokenizer.encode("]", add_special_tokens=False)[0])
    assert not torch.equal(allowed(arrived, size), allowed(request, size)), "each has a state of its own"


def test_an_unknown_grammar_is_compiled_before_its_request_can_arrive(tokenizer: Any) -> None:
    grammars = ArrivingGrammars(a_scheduler(tokenizer))
    request = new_request({"regex": "[a-z]+"})
    request.output_ids = array("q", tokenizer.encode("abc", add_special_tokens=False))
    assert grammars.give(request) == "its grammar is being compiled there"
    assert given(grammars, request) is None
    assert request.grammar.accepted_tokens == list(request.output_ids)


def test_tokens_that_the_grammar_does_not_accept_keep_a_request_where_it_is(tokenizer: Any) -> None:
    grammars = ArrivingGrammars(a_scheduler(tokenizer))
    request = new_request({"regex": "[a-z]+"})
    request.output_ids = array("q", tokenizer.encode("7", add_special_tokens=False))
    grammars.give(request)
    refusal = given(grammars, request)
    assert refusal is not None
    assert refusal.startswith("its grammar does not accept its tokens there")


@pytest.mark.parametrize("what", ["to_finish", "finished_reason", "session", "custom_logit_processor"])
def test_a_request_that_ends_or_is_not_plain_data_stays(what: str) -> None:
    request = new_request()
    assert moving.movable(request)
    setattr(request, what, object())
    assert not moving.movable(request)
