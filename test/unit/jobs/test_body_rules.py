"""Faults in a body are refused, each with its own code; what the engine should judge passes."""

from __future__ import annotations

import re

import pytest

from sgl_batch.errors import RequestError
from sgl_batch.jobs.body_rules import CHAT_URL, COMPLETIONS_URL, check_body, show

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"model": "tiny", "prompt": "hello"}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}
LOCAL_AUDIO = {"type": "audio_url", "audio_url": "/etc/passwd"}

FAULTS = [
    ("missing_model", CHAT_URL, {"messages": CHAT["messages"]}, '"tiny"'),
    ("model_mismatch", CHAT_URL, CHAT | {"model": "gpt-4"}, '"gpt-4"'),
    ("model_mismatch", CHAT_URL, CHAT | {"model": ["tiny"]}, '["tiny"]'),
    ("missing_messages", CHAT_URL, COMPLETION, "messages"),
    ("invalid_messages", CHAT_URL, CHAT | {"messages": "hello"}, '"hello"'),
    ("invalid_messages", CHAT_URL, CHAT | {"messages": ["hello"]}, "messages[0]"),
    ("empty_messages", CHAT_URL, CHAT | {"messages": []}, "at least one"),
    (
        "remote_media_not_supported",
        CHAT_URL,
        CHAT | {"messages": [{"content": [IMAGE]}]},
        "https://example.org",
    ),
    (
        "remote_media_not_supported",
        CHAT_URL,
        CHAT | {"messages": [{"content": [LOCAL_AUDIO]}]},
        "/etc/passwd",
    ),
    ("missing_prompt", COMPLETIONS_URL, CHAT, "prompt"),
    ("invalid_prompt", COMPLETIONS_URL, COMPLETION | {"prompt": 5}, "5"),
    ("empty_prompt", COMPLETIONS_URL, COMPLETION | {"prompt": ""}, "at least one token"),
    ("empty_prompt", COMPLETIONS_URL, COMPLETION | {"prompt": []}, "at least one token"),
    ("empty_prompt", COMPLETIONS_URL, COMPLETION | {"prompt": ["one", ""]}, "at least one token"),
    ("invalid_max_tokens", COMPLETIONS_URL, COMPLETION | {"max_tokens": -3}, "-3"),
    ("invalid_max_tokens", CHAT_URL, CHAT | {"max_tokens": 0}, "0"),
    ("invalid_max_tokens", CHAT_URL, CHAT | {"max_tokens": 1.5}, "1.5"),
    ("invalid_max_tokens", CHAT_URL, CHAT | {"max_tokens": True}, "true"),
    ("invalid_max_completion_tokens", CHAT_URL, CHAT | {"max_completion_tokens": "many"}, '"many"'),
    ("invalid_n", CHAT_URL, CHAT | {"n": 0}, "0"),
    ("stream_not_supported", CHAT_URL, CHAT | {"stream": True}, "true"),
    ("custom_logit_processor_not_supported", CHAT_URL, CHAT | {"custom_logit_processor": "gASV"}, "refused"),
]


@pytest.mark.parametrize(("code", "url", "body", "in_message"), FAULTS)
def test_each_fault_has_its_own_code_and_shows_the_value(code, url, body, in_message):
    with pytest.raises(RequestError, match=re.escape(in_message)) as caught:
        check_body(url, body, ("tiny",))
    assert caught.value.code == code
    assert caught.value.status_code == 400


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (CHAT_URL, CHAT),
        (CHAT_URL, CHAT | {"max_tokens": None, "n": None, "stream": None, "seed": None}),
        (CHAT_URL, CHAT | {"stream": False, "n": 3, "max_completion_tokens": 1}),
        (
            CHAT_URL,
            CHAT | {"messages": [{"content": [{"image_url": {"url": "data:image/png;base64,AAAA"}}]}]},
        ),
        (CHAT_URL, CHAT | {"temperature": -1}),  # the engine's to refuse
        (COMPLETIONS_URL, COMPLETION | {"prompt": [1, 2, 3]}),
        (COMPLETIONS_URL, COMPLETION | {"prompt": ["one", "two"]}),
    ],
)
def test_what_the_engine_should_judge_passes(url, body):
    assert check_body(url, body, ("tiny", "other")) is None


def test_a_model_mismatch_names_every_served_model():
    with pytest.raises(RequestError, match='"tiny" or "other"') as caught:
        check_body(CHAT_URL, CHAT | {"model": "huge"}, ("tiny", "other"))
    assert caught.value.param == "model"


def test_a_long_or_deep_value_is_cut_in_a_message():
    deep: object = "x"
    for _ in range(100_000):
        deep = [deep]
    assert len(show("a" * 10_000)) < 100
    assert show(deep) == "a deeply nested value"
