"""Properties of a single sequence."""

from __future__ import annotations

import pytest
from sequence_builders import sequence

from sgl_batch.core.sequence import Status


@pytest.mark.parametrize(("prompt", "new", "total"), [(10, 5, 14), (10, 1, 10), (10, 0, 10), (1, 1, 1), (1, 2, 2)])
def test_the_last_sampled_token_needs_no_position(prompt, new, total):
    assert sequence(prompt=prompt, new=new).total_tokens == total


def test_choice_0_of_a_prompt_group_leads():
    assert sequence(group="g", choice=0).is_leader
    assert not sequence(group="g", choice=1).is_leader


def test_a_sequence_without_a_prompt_group_is_no_leader():
    assert not sequence(choice=0).is_leader


def test_a_new_sequence_is_queued_and_has_generated_nothing():
    new = sequence()
    assert (new.status, new.generated_tokens) == (Status.QUEUED, 0)
