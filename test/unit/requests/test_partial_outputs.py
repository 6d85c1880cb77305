"""Of which requests tokens are recorded, how they travel to the scheduler, and when a record ends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sgl_batch.core.partial_output import PartialOutput
from sgl_batch.requests import partial_output_tag as recorded_tokens
from sgl_batch.requests import prompt_groups
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
    """A tokenized request that can be repeated, but for what is given."""
    return SimpleNamespace(
        rid=rid, sampling_params=SimpleNamespace(**{**PARAMETERS, **(parameters or {})}), **{**PLAIN, **fields}
    )


def states(**output_ids):
    return {rid: SimpleNamespace(output_ids=tokens) for rid, tokens in output_ids.items()}


def test_what_a_request_generates_is_added_to_its_record():
    recordings, record = PartialOutputs(), PartialOutput()
    with recordings.of("a", record):
        assert recordings.key_for(tokenized()) is None, "there is nothing to go on from"
        recordings.bring_up_to_date(states(a=[1, 2]))
        recordings.bring_up_to_date(states(a=[1, 2, 3], b=[9]))
    assert list(record.tokens) == [1, 2, 3]


def test_a_request_takes_its_recorded_tokens_along():
    recordings, record = PartialOutputs(), PartialOutput()
    record.put(0, range(150_000, 150_300))
    with recordings.of("a", record):
        key = recordings.key_for(tokenized())
        recordings.bring_up_to_date(states(a=[]))
    assert list(recorded_tokens.decode(key)) == list(range(150_000, 150_300))
    assert prompt_groups.decode(key) is None
    assert len(record) == 300, "before they have come back they are not forgotten"


@pytest.mark.parametrize("key", [None, "anything", prompt_groups.ChoiceTag(group="g", index=0, count=2).encode()])
def test_other_keys_have_no_tokens(key):
    assert recorded_tokens.decode(key) is None


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
def test_what_cannot_be_gone_on_with_exactly_is_not_recorded(parameters, fields):
    recordings, record = PartialOutputs(), PartialOutput()
    record.put(0, [1])
    with recordings.of("a", record):
        assert recordings.key_for(tokenized(parameters=parameters, **fields)) is None
        recordings.bring_up_to_date(states(a=[1, 2]))
    assert list(record.tokens) == [1]


def test_sglangs_own_request_has_all_that_is_asked_of_it():
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


def test_nothing_is_recorded_of_who_is_answered_or_was_never_a_line():
    recordings, record = PartialOutputs(), PartialOutput()
    assert recordings.key_for(tokenized("online")) is None
    with recordings.of("a", record):
        recordings.key_for(tokenized())
    recordings.bring_up_to_date(states(a=[1], online=[1]))
    assert len(record) == 0


def test_new_weights_end_all_records():
    recordings, record, later = PartialOutputs(), PartialOutput(), PartialOutput()
    with recordings.of("a", record):
        recordings.key_for(tokenized())
        recordings.bring_up_to_date(states(a=[1]))
        recordings.stop()
        recordings.bring_up_to_date(states(a=[1, 2]))
        assert (len(record), record.take_update()) == (0, (0, b"")), "whoever had heard of them forgets them"
    with recordings.of("b", later):
        recordings.key_for(tokenized("b"))
        recordings.bring_up_to_date(states(b=[1]))
    assert len(later) == 0
