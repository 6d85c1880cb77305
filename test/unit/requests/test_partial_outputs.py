"""Which requests have a partial output, how it travels to the scheduler, and when it ends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sgl_batch.core.partial_output import PartialOutput
from sgl_batch.requests import partial_output_tag, prompt_groups
from sgl_batch.requests.partial_outputs import PartialOutputs
from sgl_batch.sglang_adapter.tokenizing import is_repeatable

PLAIN = {
    "stream": False,
    "return_logprob": False,
    "return_sampling_mask": False,
    "return_hidden_states": False,
    "return_routed_experts": False,
    "return_indexer_topk": False,
    "return_entropy": False,
    "input_embeds": None,
    "positional_embed_overrides": None,
    "mm_inputs": None,
    "session_id": None,
    "session_params": None,
    "lora_id": None,
    "custom_logit_processor": None,
}
PARAMETERS = {"n": 1, "json_schema": None, "regex": None, "ebnf": None, "structural_tag": None, "custom_params": None}


def tokenized(rid="a", parameters=None, **fields):
    """A tokenized request that can be resumed exactly, but for the given parameters and fields."""
    return SimpleNamespace(
        rid=rid, sampling_params=SimpleNamespace(**{**PARAMETERS, **(parameters or {})}), **{**PLAIN, **fields}
    )


def states(**output_ids):
    return {rid: SimpleNamespace(output_ids=tokens) for rid, tokens in output_ids.items()}


def test_generated_tokens_are_added_to_the_partial_output():
    outputs, output = PartialOutputs(), PartialOutput()
    with outputs.of("a", output):
        assert outputs.key_for(tokenized()) is None, "there are no tokens to resume after"
        outputs.bring_up_to_date(states(a=[1, 2]))
        outputs.bring_up_to_date(states(a=[1, 2, 3], b=[9]))
    assert list(output.tokens) == [1, 2, 3]


def test_the_key_of_a_request_has_its_partial_output():
    outputs, output = PartialOutputs(), PartialOutput()
    output.put(0, range(150_000, 150_300))
    with outputs.of("a", output):
        key = outputs.key_for(tokenized())
        outputs.bring_up_to_date(states(a=[]))
    assert list(partial_output_tag.decode(key)) == list(range(150_000, 150_300))
    assert prompt_groups.decode(key) is None
    assert len(output) == 300, "the tokens stay until the scheduler has sent them back"


@pytest.mark.parametrize("key", [None, "anything", prompt_groups.ChoiceTag(group="g", index=0, count=2).encode()])
def test_other_keys_have_no_tokens(key):
    assert partial_output_tag.decode(key) is None


@pytest.mark.parametrize(
    ("parameters", "fields"),
    [
        ({"n": 2}, {}),
        ({"json_schema": "{}"}, {}),
        ({"regex": "a+"}, {}),
        ({"ebnf": "root ::= 'a'"}, {}),
        ({"structural_tag": "{}"}, {}),
        ({}, {"return_logprob": True}),
        ({}, {"stream": True}),
        ({}, {"lora_id": "adapter"}),
    ],
)
def test_a_request_that_cannot_be_resumed_exactly_has_no_partial_output(parameters, fields):
    outputs, output = PartialOutputs(), PartialOutput()
    output.put(0, [1])
    with outputs.of("a", output):
        assert outputs.key_for(tokenized(parameters=parameters, **fields)) is None
        outputs.bring_up_to_date(states(a=[1, 2]))
    assert list(output.tokens) == [1]


def test_sglangs_request_has_every_field_that_is_repeatable_reads():
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    request = TokenizedGenerateReqInput(
        rid="a",
        input_text="",
        input_ids=None,
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=SamplingParams(),
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
    )
    assert is_repeatable(request)


def test_answered_requests_and_other_requests_have_no_partial_output():
    outputs, output = PartialOutputs(), PartialOutput()
    assert outputs.key_for(tokenized("online")) is None
    with outputs.of("a", output):
        outputs.key_for(tokenized())
    outputs.bring_up_to_date(states(a=[1], online=[1]))
    assert len(output) == 0


def test_new_weights_empty_all_partial_outputs():
    outputs, output, later = PartialOutputs(), PartialOutput(), PartialOutput()
    with outputs.of("a", output):
        outputs.key_for(tokenized())
        outputs.bring_up_to_date(states(a=[1]))
        outputs.stop()
        outputs.bring_up_to_date(states(a=[1, 2]))
        assert (len(output), output.take_update()) == (0, (0, b"")), "the next update drops all tokens"
    with outputs.of("b", later):
        outputs.key_for(tokenized("b"))
        outputs.bring_up_to_date(states(b=[1]))
    assert len(later) == 0
