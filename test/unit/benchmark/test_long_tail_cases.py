"""Cases of the long tail: who runs which sequences, and in which mode."""

from __future__ import annotations

import json

import pytest
from comparison.workload import Workload
from long_tail.callbacks import nothing_moves
from long_tail.cases import Case, Sizes, chosen, dealt, longest, make_cases, modes

from sgl_batch.config import field_names
from sgl_batch.errors import ConfigError
from sgl_batch.named_function import find_function

CONFIG = {"vocab_size": 3072, "max_position_embeddings": 4096}


def work(*outputs):
    return Workload(prompts=[[7] * 2 for _ in outputs], output_lens=list(outputs), description="")


@pytest.fixture
def cases():
    return {case.name: case for case in make_cases(Sizes(), CONFIG)}


def test_every_mode_has_a_case_on_all_ranks_with_the_same_sequences(cases):
    for letter, count in (("a", 416), ("b", 104)):
        assert len(cases[f"{letter} separate"].work.prompts) == count
        for mode in modes(Sizes()):
            case = cases[f"{letter} {mode}"]
            assert (case.engines, case.ranks, case.options["tp_size"]) == (1, 2, 2)
            assert case.work is cases[f"{letter} separate"].work


def test_modes_differ_in_flags_of_the_engine_alone():
    assert {name for options in modes(Sizes()).values() for name in options} <= field_names()


def test_only_modes_that_say_so_partition_or_draft(cases):
    found = {
        name: (case.options["partition_below"], case.options["speculate"])
        for name, case in cases.items()
        if name[0] == "a"
    }
    assert found == {
        **dict.fromkeys(("a separate", "a nothing", "a migration", "a spread"), (0, "off")),
        "a partition": (2, "off"),
        "a speculation": (0, "auto"),
        "a all": (2, "auto"),
    }


def test_sequences_are_dealt_so_that_parts_have_about_the_same_tokens():
    sequences = work(9, 1, 4, 3, 1, 2)
    parts = dealt(sequences, 2)
    assert sorted(parts[0] + parts[1]) == list(range(6))
    sums = [sum(2 + sequences.output_lens[number] for number in part) for part in parts]
    assert abs(sums[0] - sums[1]) <= 3, "as even as the shortest sequences allow"
    assert dealt(sequences, 1) == [list(range(6))]


def test_the_longest_sequence_is_the_one_with_the_most_output():
    assert longest(work(3, 8, 2)).output_lens == [8]


def test_the_straggler_and_the_long_prompt_have_the_sizes_asked_for():
    cases = {case.name: case for case in make_cases(Sizes(straggler_tokens=50, prompt_tokens=700), CONFIG)}
    straggler, prompt = cases["c one rank"].work, cases["d one rank"].work
    assert straggler.output_lens == [50]
    assert straggler.prompts[0][:24] == straggler.prompts[0][24:48], "its prompt repeats itself"
    assert (len(prompt.prompts[0]), prompt.output_lens) == (700, [1])


def test_where_a_sequence_is_longer_than_the_context_the_context_is_made_longer(cases):
    assert "json_model_override_args" not in cases["a separate"].options
    given = json.loads(cases["d one rank"].options["json_model_override_args"])
    assert given["max_position_embeddings"] > 16384


def test_options_for_the_long_prompt_are_those_of_one_case():
    cases = make_cases(Sizes(prompt_options={"partition_below": 9}), CONFIG)
    assert [case.name for case in cases if case.options["partition_below"] == 9] == ["d partition"]


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ("", ["a all", "a spread", "c one rank"]),
        ("a", ["a all", "a spread"]),
        ("c one rank, a all", ["a all", "c one rank"]),
    ],
)
def test_cases_are_chosen_by_letter_or_name_in_their_order(only, names):
    cases = [Case(name=name, work=work(1), options={}) for name in ("a all", "a spread", "c one rank")]
    assert [case.name for case in chosen(cases, only)] == names
    with pytest.raises(ConfigError, match=r"--only has 'x'.* a all, a spread, c one rank"):
        chosen(cases, f"{only},x")


@pytest.mark.parametrize(
    "change", [{"ranks": 1}, {"many": 99}, {"few": 99}, {"straggler_tokens": 0}, {"prompt_tokens": 0}]
)
def test_a_size_that_cannot_be_is_refused_with_its_flag(change):
    (name,) = change
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} is"):
        Sizes(**change)


def test_the_callback_of_a_mode_is_found_and_moves_nothing():
    named = modes(Sizes())["migration"]["on_long_tail"]
    assert find_function("on_long_tail", named, "a view") is nothing_moves
    assert nothing_moves(None) == ()
