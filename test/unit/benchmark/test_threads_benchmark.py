"""The benchmark of numbers of threads: its figures, its bar, and that tokens are the same."""

from __future__ import annotations

import os

import pytest
from comparison.workload import Workload
from threads import Run, main, markdown, parse_threads, run_of, same_tokens

from sgl_batch.errors import ConfigError, EngineError

WORKLOAD = Workload(prompts=[[5, 6]], output_lens=[2], description="one prompt")


def answered(cores: int, wall_s: float, cpu_s: float, *, tokens: tuple[int, ...] = (7, 8)) -> Run:
    return Run(cores=cores, wall_s=wall_s, cpu_s=cpu_s, cpus_of_others=0.1, outputs=[list(tokens)])


def found(**changes: object) -> dict[str, object]:
    return {"wall_s": 2.0, "cpu_s": 3.0, "cpus_of_others": 0.0, "outputs": [[7, 8]], **changes}


def row_of(text: str, threads: int) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {threads} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_row_has_seconds_processor_seconds_and_their_share_of_the_cores() -> None:
    text = markdown([{1: answered(1, 10.0, 10.2), 2: answered(2, 6.0, 11.4)}])
    assert row_of(text, 1)[1:] == ["1", "10.00", "10.20", "1.02", "1.00", "yes"]
    assert row_of(text, 2)[1:] == ["2", "6.00", "11.40", "0.95", "1.12", "yes"]


def test_an_engine_that_takes_more_than_its_cores_is_named() -> None:
    assert row_of(markdown([{1: answered(1, 10.0, 11.0)}]), 1)[-1] == "NO"


def test_processor_seconds_are_compared_with_those_of_the_fewest_threads_in_the_same_round() -> None:
    rounds = [{1: answered(1, 10.0, 10.0), 2: answered(2, 5.0, 10.0)}, {1: answered(1, 9.0, 9.0)}]
    rounds[1][2] = answered(2, 9.0, 18.0)
    assert row_of(markdown(rounds), 2)[5] == "1.50 (1.00-2.00)"


def test_tokens_that_differ_are_told() -> None:
    rounds = [{1: answered(1, 1.0, 1.0), 2: answered(2, 1.0, 1.0, tokens=(7, 9))}]
    assert not same_tokens(rounds)
    assert "TOKENS DIFFER" in markdown(rounds)


def test_more_threads_than_the_machine_has_cores_count_as_its_cores() -> None:
    run = run_of(found(), None, 10_000, WORKLOAD)
    assert run.cores == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("result", "reason", "told"),
    [
        ({}, "timed out after 9 s", "4 threads failed: timed out"),
        (found(outputs=[[7]]), None, "prompt 1 gave 1 output tokens"),
        (found(cpu_s=None), None, "/proc does not say"),
    ],
)
def test_an_engine_that_measured_nothing_whole_has_failed(
    result: dict[str, object], reason: str | None, told: str
) -> None:
    with pytest.raises(EngineError, match=told):
        run_of(result, reason, 4, WORKLOAD)


def test_numbers_of_threads_are_read_once_each() -> None:
    assert parse_threads("4, 1,4") == [4, 1]


@pytest.mark.parametrize("text", ["", "0,1", "1,two", "1,,2"])
def test_other_texts_are_no_numbers_of_threads(text: str) -> None:
    with pytest.raises(ConfigError, match="--threads is"):
        parse_threads(text)


def test_no_rounds_are_refused() -> None:
    with pytest.raises(ConfigError, match="--rounds is 0"):
        main(["--model", "anywhere", "--rounds", "0"])
