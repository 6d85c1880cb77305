"""`sgl-batch run --resume`: whatever stopped a run, its files end as those of an uninterrupted run."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from in_memory_engine import prepare_in_memory, request

from sgl_batch.cli.run.command import run_command

PROGRAM = Path(__file__).parents[2] / "jobs" / "in_memory_engine.py"


class Job:
    """The files of one input, and the command on them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.input = directory / "in.jsonl"

    def write(self, *prompts: str) -> None:
        lines = [json.dumps(request(f"id-{i}", prompt)) for i, prompt in enumerate(prompts)]
        self.input.write_text("".join(f"{line}\n" for line in lines))

    def argv(self, *more: str, output: str = "out.jsonl") -> list[str]:
        return ["-i", str(self.input), "-o", str(self.directory / output), "--model", "tiny", *more]

    def run(self, *more: str, output: str = "out.jsonl") -> int:
        return run_command(self.argv("--progress", "off", *more, output=output), prepare_in_memory)

    def result_lines(self, name: str) -> list[Any]:
        """Without what is made of the run's id."""
        path = self.directory / name
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [(one["custom_id"], one["response"]["status_code"], one["response"]["body"]) for one in found]

    def keep(self, name: str, wanted: list[int]) -> None:
        """Leave only these lines of a file."""
        path = self.directory / name
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[index] for index in wanted))

    @property
    def manifest(self) -> dict[str, Any]:
        return dict(json.loads((self.directory / "out.manifest.json").read_text()))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


PROMPTS = ["a", "refuse", "c", "", "e", "f", "refuse", "h"]  # lines 1, 3 and 6 fail


def same_as_unstopped(job: Job) -> bool:
    assert job.run(output="whole.jsonl") == 2
    return all(job.result_lines(f"out{end}") == job.result_lines(f"whole{end}") for end in (".jsonl", ".errors.jsonl"))


@pytest.mark.parametrize(
    ("good", "bad"),
    [([], []), ([0], []), ([0, 1], [0]), ([1, 4], [1, 2]), ([4], [0, 1, 2]), ([0, 1, 2, 3, 4], [0, 2])],
)
def test_missing_lines_are_run_and_written_in_order(job: Job, good: list[int], bad: list[int]) -> None:
    job.write(*PROMPTS)
    assert job.run() == 2
    first = (job.directory / "out.jsonl").read_bytes()
    job.keep("out.jsonl", good)
    job.keep("out.errors.jsonl", bad)
    assert job.run("--resume") == 2
    assert same_as_unstopped(job)
    assert (job.directory / "out.jsonl").read_bytes() == first, "ids too"
    assert job.manifest["counts"] | {"failed_by_code": None} == {
        "total": 8,
        "ok": 5,
        "failed": 3,
        "missing": 0,
        "failed_by_code": None,
    }
    assert job.manifest["resumed"][0]["kept"] == len(good) + len(bad)
    assert not [path for path in job.directory.iterdir() if path.name.startswith(".")]


def test_a_torn_last_line_is_cut_and_run_again(job: Job) -> None:
    job.write(*PROMPTS)
    job.run()
    path = job.directory / "out.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert job.run("--resume") == 2
    assert same_as_unstopped(job)


def test_failed_lines_are_run_again_only_where_asked_for(job: Job) -> None:
    job.write("a", "die", "c")
    assert job.run() == 3
    job.write("a", "refuse", "c")
    assert job.run("--resume") == 1, "the input differs"
    job.write(*PROMPTS)
    assert job.run("--overwrite") == 2
    errors = job.directory / "out.errors.jsonl"
    errors.write_bytes(errors.read_bytes().replace(b"the prompt is too long", b"a fault of yesterday"))
    assert job.run("--resume") == 2
    assert b"a fault of yesterday" in errors.read_bytes()
    assert job.run("--resume", "--retry-failed") == 2
    assert same_as_unstopped(job)


def test_a_run_with_another_input_model_or_seed_is_not_resumed(job: Job, capsys: Any) -> None:
    job.write("a", "b")
    job.run()
    assert job.run("--resume", "--seed", "5") == 1
    assert "seed was 0, now 5" in capsys.readouterr().err
    assert job.run("--resume", "--seed", "5", "--force") == 0
    job.write("a", "x")
    assert job.run("--resume", "--force") == 1
    assert "other contents than now" in capsys.readouterr().err


def test_resuming_a_run_that_never_began_begins_it(job: Job) -> None:
    job.write("a", "b")
    assert job.run("--resume") == 0
    assert len(job.result_lines("out.jsonl")) == 2


def test_files_of_others_are_not_touched(job: Job, capsys: Any) -> None:
    job.write("a", "b")
    job.run()
    path = job.directory / "out.jsonl"
    (job.directory / "out.manifest.json").rename(job.directory / "kept.json")
    assert job.run("--resume") == 1
    assert "its manifest" in capsys.readouterr().err
    (job.directory / "kept.json").rename(job.directory / "out.manifest.json")
    foreign = path.read_bytes() + b'{"id": "batch_req_other"}\n'
    path.write_bytes(foreign)
    assert job.run("--resume") == 1
    assert "line 3" in capsys.readouterr().err
    assert path.read_bytes() == foreign
    assert not [path for path in job.directory.iterdir() if path.name.startswith(".")]


def test_kills_at_random_moments_lose_and_double_nothing(job: Job) -> None:
    dice = random.Random(3)
    job.write(*(PROMPTS * 2000))
    argv = [sys.executable, str(PROGRAM), "run", *job.argv("--progress", "off", "--resume")]
    num_killed = 0
    for _ in range(12):
        process = subprocess.Popen(argv, stderr=subprocess.PIPE)
        time.sleep(dice.uniform(0.2, 0.5))
        process.kill()
        process.communicate()
        num_killed += process.returncode < 0
        if process.returncode >= 0:  # it was done before: the next one begins anew
            for path in job.directory.glob("out*"):
                path.unlink()
    assert num_killed >= 2
    assert job.run("--resume") == 2
    assert same_as_unstopped(job)


def killed_behind_a_slow_line(job: Job, *prompts: str) -> Path:
    """Run with a first line that never ends, killed when all lines before "kill" have ended. Return what it kept."""
    job.write("hold", *prompts)
    argv = [sys.executable, str(PROGRAM), "run", *job.argv("--progress", "off")]
    done = subprocess.run(argv, capture_output=True, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert job.result_lines("out.jsonl") == []
    [kept] = job.directory.glob(".out.jsonl.kept-*")
    return kept


def same_as_undisturbed(job: Job) -> bool:
    job.run("--release", output="whole.jsonl")
    return all(job.result_lines(f"out{end}") == job.result_lines(f"whole{end}") for end in (".jsonl", ".errors.jsonl"))


def test_lines_behind_a_slow_one_outlive_a_kill(job: Job) -> None:
    killed_behind_a_slow_line(job, *["x", "refuse", "y"] * 310, "kill", *["z"] * 568)
    assert job.run("--resume", "--release") == 2
    assert job.manifest["resumed"][-1]["kept"] == 930
    assert job.manifest["usage"]["completion_tokens"] == 5 * (1500 - 930), "only lines of the second run count"
    assert same_as_undisturbed(job)
    assert not [path for path in job.directory.iterdir() if path.name.startswith(".")]


def test_a_line_with_a_torn_result_behind_a_slow_line_runs_again(job: Job) -> None:
    kept = killed_behind_a_slow_line(job, "x", "y", "kill")
    kept.write_bytes(kept.read_bytes()[:-20])
    assert job.run("--resume", "--release") == 0
    assert job.manifest["resumed"][-1]["kept"] == 1
    assert same_as_undisturbed(job)


def test_failed_lines_behind_a_slow_one_are_run_again_where_asked_for(job: Job) -> None:
    kept = killed_behind_a_slow_line(job, "x", "refuse", "kill")
    kept.write_bytes(kept.read_bytes().replace(b"the prompt is too long", b"a fault of yesterday"))
    assert job.run("--resume", "--release", "--retry-failed") == 2
    assert job.manifest["resumed"][-1]["kept"] == 1
    assert same_as_undisturbed(job)


@pytest.mark.parametrize("spoiled", [b"no record\n", b'1 0 {"id": "batch_req_other"}\n', b"9 0 {}\n"])
def test_a_kept_line_of_another_run_is_refused(job: Job, spoiled: bytes, capsys: Any) -> None:
    kept = killed_behind_a_slow_line(job, "x", "kill")
    kept.write_bytes(spoiled)
    assert job.run("--resume", "--release") == 1
    error = capsys.readouterr().err
    assert f"{kept} was not written by the run" in error
    assert "--overwrite" in error
    assert kept.read_bytes() == spoiled
    assert job.run("--overwrite", "--release") == 0
    assert not kept.exists()


def test_where_nothing_is_left_no_engine_is_started_and_nothing_is_written(job: Job, capsys: Any) -> None:
    job.write(*PROMPTS)
    assert job.run() == 2
    before = {path: path.read_bytes() for path in job.directory.iterdir()}

    def none_needed(argv: Any, workload: Any) -> Any:
        def start() -> Any:
            raise AssertionError("an engine was started")

        return start

    assert run_command(job.argv("--progress", "off", "--resume"), none_needed) == 2
    assert "nothing is left to do: all 8 lines are done, 3 of them failed (--retry-failed" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in job.directory.iterdir()} == before


@pytest.mark.parametrize(
    ("first", "again", "mode", "why"),
    [
        ([], [], "sglang", "earlier"),
        (["--decode-forward", "measure"], ["--decode-forward", "measure"], "sglang", "earlier"),
        ([], ["--decode-forward", "eager"], "eager", "asked for"),
        ([], ["--decode-forward=auto"], "sglang", "measured"),
        (["--decode-forward", "eager"], [], "eager", "earlier"),
    ],
)
def test_a_resumed_run_keeps_the_decode_choice_of_the_earlier_one(
    job: Job, first: list[str], again: list[str], mode: str, why: str
) -> None:
    job.write("a", "b")
    assert job.run(*first) == 0
    job.keep("out.jsonl", [0])
    for _ in range(2):
        assert job.run("--resume", *again) == 0
        assert job.manifest["plan"]["choices"]["decode_forward"] == {"mode": mode, "why": why}
        job.keep("out.jsonl", [0])
