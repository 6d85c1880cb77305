"""`sgl-batch run` on tables: the same lines as from JSONL, one table out, and `--resume` by the same rules."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_memory_engine import prepare_in_memory, request

from sgl_batch.cli.run.command import run_command

PROMPTS = ["a", "refuse", "c", "", "e"]  # rows 1 and 3 fail


class Job:
    """A table of prompts, and the command on it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.input = directory / "in.parquet"
        self.output = directory / "out.parquet"
        self.write(PROMPTS)

    def write(self, prompts: list[str]) -> None:
        ids = [f"id-{number}" for number in range(len(prompts))]
        pq.write_table(pa.table({"prompt": prompts, "custom_id": ids}), self.input)

    def run(self, *more: str, output: str = "out.parquet") -> int:
        argv = ["-i", str(self.input), "-o", str(self.directory / output), "--model", "tiny", "--progress", "off"]
        body = ["--body", '{"max_tokens": 4}'] if self.input.suffix == ".parquet" else []
        return run_command([*argv, *body, *more], prepare_in_memory)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return pq.read_table(self.output).to_pylist()

    @property
    def names(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_a_table_in_gives_a_table_out_with_failed_rows_in_their_places(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job.run() == 2
    assert [(row["row"], row["custom_id"], row["status_code"]) for row in job.rows] == [
        (number, f"id-{number}", 400 if number in (1, 3) else 200) for number in range(5)
    ]
    assert [row["error_code"] for row in job.rows] == [None, "context_length_exceeded", None, "empty_prompt", None]
    assert job.names == ["in.parquet", "out.manifest.json", "out.parquet"]
    shown = capsys.readouterr().err
    assert f"Output: {job.output}" in shown
    assert "5 rows of the table" in shown


def test_answers_are_those_of_the_same_lines_as_jsonl(job: Job) -> None:
    assert job.run() == 2
    lines = [json.dumps(request(f"id-{number}", prompt)) for number, prompt in enumerate(PROMPTS)]
    job.input = job.directory / "in.jsonl"
    job.input.write_text("".join(f"{line}\n" for line in lines))
    assert job.run(output="lines.jsonl") == 2
    wanted = [json.loads(line) for line in (job.directory / "lines.jsonl").read_text().splitlines()]
    found = [row for row in job.rows if row["status_code"] == 200]
    assert [json.loads(row["body"]) for row in found] == [one["response"]["body"] for one in wanted]


def test_a_stopped_run_leaves_lines_and_can_be_resumed(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.write(["a", "refuse", "die", "d"])
    assert job.run() == 3
    assert job.names == ["in.parquet", "out.manifest.json", "out.parquet.errors.jsonl", "out.parquet.jsonl"]
    assert f"Output: {job.output}.jsonl" in capsys.readouterr().err
    assert job.run() == 1, "it exists already"
    job.write(["a", "refuse", "c", "d"])
    assert job.run("--resume") == 1, "the rows have changed"
    assert "other contents than now" in capsys.readouterr().err


@pytest.mark.parametrize("is_ended", [True, False])
def test_resume_runs_missing_and_failed_lines_and_keeps_the_others(job: Job, is_ended: bool) -> None:
    assert job.run() == 2
    before = job.output.read_bytes()
    if not is_ended:  # as a kill just before its end leaves it
        assert job.run("--overwrite", output="other.parquet") == 2
        from sgl_batch.file_run.table_output import TableOutput

        run_id = json.loads((job.directory / "out.manifest.json").read_text())["run_id"]
        TableOutput(table=job.output).restore(run_id)
        job.output.unlink()
        lines = (job.directory / "out.parquet.jsonl").read_bytes().splitlines(keepends=True)
        (job.directory / "out.parquet.jsonl").write_bytes(lines[0] + lines[2])
    assert job.run("--resume", "--retry-failed") == 2
    assert job.output.read_bytes() == before
    manifest = json.loads((job.directory / "out.manifest.json").read_text())
    assert manifest["resumed"][-1]["kept"] == (3 if is_ended else 2)
    assert not [name for name in job.names if name.startswith("out.parquet.")]


def test_overwrite_leaves_nothing_of_the_last_run(job: Job) -> None:
    assert job.run() == 2
    assert job.run() == 1
    job.write(["a", "die"])
    assert job.run("--overwrite") == 3
    assert not job.output.exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--errors", "e.jsonl"), "failed lines are rows of the table"),
        (("--chat-column", "a", "--prompt-column", "b"), "give one of them"),
        (("--body", "[]"), "give an object"),
        (("--chat-column", "a"), "no column a; there are prompt, custom_id"),
    ],
)
def test_bad_usage_is_reported_and_nothing_runs(
    job: Job, more: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job.run(*more) == 1
    assert words in capsys.readouterr().err
    assert job.names == ["in.parquet"]


@pytest.mark.parametrize(("source", "output"), [("in.parquet", "o.jsonl"), ("in.jsonl", "o.parquet")])
def test_without_pyarrow_the_error_says_how_to_install_it(
    job: Job, source: str, output: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def absent(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == "pyarrow":
            raise ImportError(f"No module named {name!r}")
        return real(name, *rest)

    (job.directory / "in.jsonl").write_text(json.dumps(request("a")) + "\n")
    job.input = job.directory / source
    monkeypatch.setattr(builtins, "__import__", absent)
    assert job.run(output=output) == 1
    assert "needs pyarrow, which is not installed: pip install pyarrow" in capsys.readouterr().err
