"""KV that is computed a second time is counted: planned for shared prompts, unplanned for a sequence's own KV."""

from __future__ import annotations

from sequence_builders import choices, sequence

from sgl_batch.core.recomputation import Recomputed, note_prefill


def test_a_first_prefill_recomputes_nothing_however_it_is_cut():
    whole, cut = sequence(0, prompt=10), sequence(1, prompt=10)
    assert note_prefill(whole, 0, 10) == Recomputed()
    assert note_prefill(cut, 0, 6) == note_prefill(cut, 6, 10) == Recomputed()


def test_a_shared_prefix_is_not_computed():
    assert note_prefill(sequence(prompt=10), 8, 10) == Recomputed()


def test_a_second_prefill_of_a_sequence_is_unplanned_where_it_repeats_the_first():
    twice = sequence(prompt=10)
    note_prefill(twice, 0, 10)
    assert note_prefill(twice, 4, 13) == Recomputed(unplanned=6)
    assert note_prefill(twice, 0, 13) == Recomputed(unplanned=13)


def test_recomputing_the_last_prompt_token_of_a_choice_is_planned():
    leader, follower, alone = choices(3, prompt=10)
    assert note_prefill(leader, 0, 10) == Recomputed()
    assert note_prefill(follower, 9, 10) == Recomputed(planned=1)
    assert note_prefill(alone, 0, 10) == Recomputed(planned=10)
    assert note_prefill(follower, 0, 10) == Recomputed(unplanned=10), "a third time is unplanned"


def test_recomputing_a_retracted_sequence_is_planned_once():
    retracted = sequence(prompt=10)
    note_prefill(retracted, 0, 10)
    retracted.generated_tokens, retracted.computed_tokens = 4, 0
    retracted.lost_tokens = retracted.kv_tokens
    assert retracted.prefill_rows == 13
    assert note_prefill(retracted, 4, 13) == Recomputed(planned=9)
    assert note_prefill(retracted, 4, 13) == Recomputed(unplanned=9)
