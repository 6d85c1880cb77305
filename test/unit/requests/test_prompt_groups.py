"""The tag of a request's choices is read as it was written, and no other key is taken for one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_batch.requests.prompt_groups import ChoiceTag, decode

# No deadline: a busy machine is no fault of the code.
QUICK = settings(max_examples=60, deadline=None)


@QUICK
@given(st.text(), st.integers(0, 10**6), st.integers(1, 10**6))
def test_a_tag_is_read_as_it_was_written(group, index, count):
    tag = ChoiceTag(group=group, index=index, count=count)
    assert decode(tag.encode()) == tag


@pytest.mark.parametrize(
    "key", [None, "", "salt", "sgl_batch", "sgl_batch.choice", "sgl_batch.choices:0:1:g", ":0:1:g"]
)
def test_any_other_key_is_a_request_of_one_choice(key):
    assert decode(key) is None


@pytest.mark.parametrize("rest", ["", "x", "0:1", "a:b:c", "0:x:g", "-1:2:g", ":1:g"])
def test_a_key_that_only_begins_like_a_tag_is_a_request_of_one_choice(rest):
    assert decode(f"sgl_batch.choice:{rest}") is None
