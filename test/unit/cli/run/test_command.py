"""`sgl-batch run` from end to end with an engine in memory: files, manifest, exit codes, signals."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from in_memory_engine import InMemoryBatchEngine, InMemoryEngine, prepare_in_memory, request

from sgl_batch.cli.run.command import run_command
from sgl_batch.errors import ConfigError, EngineError
from sgl_batch.planner.schedule import Prediction

PROGRAM = Path(__file__).parents[2] / "jobs" / "in_memory_engine.py"


@pytest.fixture
def job(tmp_path):
    return JobFiles(tmp_path)


class JobFiles:
    """The files of one job, and the command on them."""

    def __init__(self, directory):
        self.directory = directory
        self.input = directory / "in.jsonl"

    def write(self, *prompts):
        lines = [request(f"id-{i}", prompt) for i, prompt in enumerate(prompts)]
        self.input.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def argv(self, *more, output="out.jsonl"):
        return ["-i", str(self.input), "-o", str(self.directory / output), "--model", "tiny", *more]

    def run(self, *more, output="out.jsonl"):
        return run_command(self.argv("--progress", "plain", *more, output=output), prepare_in_memory)

    def start(self, *more):
        return subprocess.Popen(
            [sys.executable, str(PROGRAM), "run", *self.argv("--progress", "plain", *more)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ids(self, name="out.jsonl"):
        return [json.loads(line)["custom_id"] for line in (self.directory / name).read_text().splitlines()]

    def manifest(self, name="out.manifest.json"):
        return json.loads((self.directory / name).read_text())

    @property
    def names(self):
        return sorted(path.name for path in self.directory.iterdir())


def swallowed(error):
    """Return an import that Ctrl-C breaks, and that tells nobody, or raises an error of its own."""

    def prepare(argv, workload):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            if error is not None:
                raise error from None
        return prepare_in_memory(argv, workload)

    return prepare


@pytest.mark.parametrize("error", [None, ImportError("cannot load module more than once per process")])
def test_an_interrupt_that_an_import_swallows_ends_the_run_in_a_line(job, capsys, error):
    job.write("a")
    assert run_command(job.argv("--progress", "plain"), swallowed(error)) == 130
    said = capsys.readouterr().err
    assert said.endswith("sgl-batch run: error: interrupted before the first line; nothing has run\n")
    assert "Traceback" not in said
    assert job.names == ["in.jsonl"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_good_run_exits_0_and_leaves_output_and_manifest_only(job, capsys):
    job.write("a", "b", "c")
    assert job.run() == 0
    assert job.ids() == ["id-0", "id-1", "id-2"]
    assert job.names == ["in.jsonl", "out.jsonl", "out.manifest.json"]
    err = capsys.readouterr().err
    for part in (
        "3/3 lines",
        "Done: 3 of 3 lines ok",
        "Where the time went:",
        "5.0 tokens for each expert",
        "Output: ",
    ):
        assert part in err


def test_failed_lines_exit_2_and_have_their_own_file(job, capsys):
    job.write("a", "refuse", "")
    assert job.run() == 2
    assert job.ids() == ["id-0"]
    assert job.ids("out.errors.jsonl") == ["id-1", "id-2"]
    err = capsys.readouterr().err
    assert "context_length_exceeded" in err
    assert "empty_prompt" in err
    assert "Errors: " in err


def test_a_dead_engine_exits_3_and_says_how_many_lines_are_missing(job, capsys):
    job.write("a", "die")
    assert job.run() == 3
    assert job.ids() == ["id-0"]
    err = capsys.readouterr().err
    assert "the engine died: the scheduler process ended with signal 9" in err
    assert "1 of 2 lines have neither an output nor an error" in err
    assert job.manifest()["status"] == "failed"
    assert job.manifest()["counts"]["missing"] == 1


def test_an_empty_input_is_refused_before_the_engine_starts(job, capsys):
    job.input.write_text("\n\n")
    assert job.run() == 1
    assert "has no request line" in capsys.readouterr().err
    assert job.names == ["in.jsonl"]


def test_a_bad_engine_flag_exits_1_without_a_traceback_and_without_files(job, capsys):
    job.write("a")
    assert job.run("--ouput", "x") == 1
    err = capsys.readouterr().err
    assert "unrecognized arguments: --ouput x" in err
    assert "Traceback" not in err
    assert job.names == ["in.jsonl"]


def test_an_engine_that_does_not_start_exits_3_and_keeps_the_old_output(job, capsys):
    def prepare(argv, workload):
        def start():
            raise EngineError("no memory for the KV pool")

        return start

    job.write("a")
    (job.directory / "out.jsonl").write_text("old\n")
    assert run_command(job.argv("--overwrite"), prepare) == 3
    assert "no memory for the KV pool" in capsys.readouterr().err
    assert (job.directory / "out.jsonl").read_text() == "old\n"


def test_an_engine_that_refuses_a_flag_at_its_start_exits_1_with_its_message_alone(job, capsys):
    def prepare(argv, workload):
        def start():
            raise ConfigError("device_memory is 100.00 MiB, and 600.00 MiB are needed")

        return start

    job.write("a")
    assert run_command(job.argv(), prepare) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "sgl-batch run: error: device_memory is 100.00 MiB, and 600.00 MiB are needed"
    assert job.names == ["in.jsonl"]


def test_a_fault_of_the_program_exits_3_with_its_traceback(job, caplog):
    def prepare(argv, workload):
        raise ZeroDivisionError("surprise")

    job.write("a")
    assert run_command(job.argv(), prepare) == 3
    assert "ZeroDivisionError: surprise" in caplog.text


def test_limit_runs_the_first_lines_only(job):
    job.write("a", "b", "c")
    assert job.run("--limit", "2") == 0
    assert job.ids() == ["id-0", "id-1"]
    assert job.manifest()["counts"]["total"] == 2


def test_overwrite_removes_the_error_file_of_the_last_run(job):
    job.write("refuse")
    assert job.run() == 2
    job.write("a")
    assert job.run("--overwrite") == 0
    assert job.names == ["in.jsonl", "out.jsonl", "out.manifest.json"]


def test_standard_input_is_read_like_a_file(job, monkeypatch):
    job.write("a", "b")
    content = job.input.read_bytes()

    class Stdin:
        buffer = io.BytesIO(content)

    monkeypatch.setattr(sys, "stdin", Stdin)
    argv = ["-i", "-", "-o", str(job.directory / "out.jsonl"), "--model", "tiny"]
    assert run_command(argv, prepare_in_memory) == 0
    assert job.ids() == ["id-0", "id-1"]
    assert job.manifest()["input"]["num_bytes"] == len(content)


def test_the_manifest_repeats_the_run(job):
    job.write("a", "refuse", "c")
    job.run("--seed", "5", "--served-model-name", "tiny")
    argv = job.manifest()["command"]["argv"]
    assert argv[:2] == ["sgl-batch", "run"]
    repeated = [one.replace("out.jsonl", "again.jsonl") for one in argv[2:]]
    assert run_command(repeated, prepare_in_memory) == 2

    def bodies(name):
        lines = map(json.loads, (job.directory / name).read_text().splitlines())
        return [(line["custom_id"], line["response"]["body"]) for line in lines]

    assert bodies("again.jsonl") == bodies("out.jsonl")
    assert bodies("again.errors.jsonl") == bodies("out.errors.jsonl")
    first, second = job.manifest(), job.manifest("again.manifest.json")
    for key in ("input", "model", "versions", "seeds", "plan", "counts", "usage"):
        assert first[key] == second[key]
    assert first["seeds"]["job_seed"] == 5
    assert first["run_id"] != second["run_id"]


def test_another_job_seed_gives_other_answers(job):
    job.write("a")
    job.run("--seed", "5")
    job.run("--seed", "6", output="other.jsonl")
    texts = [
        json.loads((job.directory / name).read_text())["response"]["body"]["choices"]
        for name in ("out.jsonl", "other.jsonl")
    ]
    assert texts[0] != texts[1]


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_writes_finished_lines_and_exits_130(job, signal_number):
    job.write("a", "b", "hold", "d", "e")
    process = job.start("--max-in-flight", "5")
    assert process.stdout.readline() == "holding\n"
    process.send_signal(signal_number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert job.ids() == ["id-0", "id-1", "id-3", "id-4"]
    assert "1 of 5 lines have neither an output nor an error" in err
    assert "Interrupted: 4 of 5 lines ok, 0 failed, 1 missing" in err
    command = shlex.join(job.argv("--progress", "plain", "--max-in-flight", "5", "--resume"))
    assert err.splitlines()[-1].endswith(f"Go on with: sgl-batch run {command}")
    assert (job.manifest()["status"], job.manifest()["exit_code"]) == ("interrupted", 130)
    assert job.names == ["in.jsonl", "out.jsonl", "out.manifest.json"]


def test_a_signal_after_the_last_line_changes_nothing(job):
    class LateSignal(InMemoryBatchEngine):
        def shutdown(self):
            os.kill(os.getpid(), signal.SIGINT)
            super().shutdown()

    before = signal.getsignal(signal.SIGINT)
    job.write("a")
    engine = LateSignal(InMemoryEngine())
    assert run_command(job.argv(), lambda argv, workload: lambda: engine) == 0
    assert job.manifest()["status"] == "completed"
    assert engine.is_shut_down
    assert signal.getsignal(signal.SIGINT) is before


def test_the_plan_and_its_prediction_stand_beside_what_was_measured(job, capsys):
    job.write("a", "b" * 40)
    engine, asked = InMemoryBatchEngine(InMemoryEngine()), []

    def predict(workload):
        asked.append(workload)
        return Prediction(seconds=9.0, prefill_s=2.0)

    def prepare(argv, workload):
        asked.append(workload(None))
        return lambda: engine

    engine.predict = predict
    assert run_command(job.argv("--progress", "plain"), prepare) == 0
    before, after = ([(one.prompt, one.output) for one in workload.requests] for workload in asked)
    assert (before, after) == ([(1, 4), (10, 4)], [(7, 5), (7, 5)])
    err = capsys.readouterr().err
    assert "Plan: conservative defaults (in memory)" in err
    assert "Predicted and measured" in err
    prediction = job.manifest()["prediction"]
    assert prediction["predicted_s"]["total"] == 9.0
    assert prediction["measured_s"]["total"] == pytest.approx(job.manifest()["wall_s"], abs=1e-3)
    assert job.manifest()["plan"]["planned"]["chosen"] == {}


def test_without_a_prediction_a_run_says_where_its_plan_is_from(job, capsys):
    job.write("a")
    assert job.run() == 0
    assert "Plan: conservative defaults (in memory)" in capsys.readouterr().err
    assert "prediction" not in job.manifest()


def test_with_a_price_the_cost_stands_in_progress_summary_and_manifest(job, capsys):
    class Planned(InMemoryBatchEngine):
        def plan_manifest(self):
            workload = {"source": "made", "requests": 4, "prompt_tokens": 28, "output_tokens": 20}
            return {
                **super().plan_manifest(),
                "planned": {"source": "made", "predicted": {"seconds": 72.0}, "workload": workload},
            }

    job.write("a", "b")
    argv = job.argv("--progress", "plain", "--price-per-hour", "10")
    assert run_command(argv, lambda *_: lambda: Planned(InMemoryEngine())) == 0
    err, cost = capsys.readouterr().err, job.manifest()["cost"]
    assert "cost: 0.100 (by the plan); a million lines 50,000.00" in err
    assert "  cost        " in err
    assert (cost["price_per_hour"], cost["before"]["amount"]) == (10.0, 0.1)
    assert cost["amount"] == pytest.approx(10 * job.manifest()["wall_s"] / 3600, rel=0.1, abs=3e-6)
    assert job.run("--overwrite") == 0
    assert "cost " not in capsys.readouterr().err
    assert "cost" not in job.manifest()


def test_a_price_that_is_none_is_refused_in_one_line(job, capsys):
    job.write("a")
    assert job.run("--price-per-hour", "nan") == 1
    error = "sgl-batch run: error: --price-per-hour is 'nan'; it takes a number of at least 0"
    assert capsys.readouterr().err.startswith(error)
    assert job.names == ["in.jsonl"]


def test_the_resume_command_is_shortened_and_replaces_nothing(job, capsys):
    job.write("a", "die")
    assert job.run("--overwrite", "--spool-dir", str(job.directory) + "/." * 150) == 3
    last = capsys.readouterr().err.splitlines()[-1]
    files = shlex.join(job.argv())
    assert last.endswith(f"Go on with: sgl-batch run {files} ... --resume (all flags as before)")
    assert job.run("--overwrite") == 3
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(f"Go on with: sgl-batch run {shlex.join(job.argv('--progress', 'plain', '--resume'))}")


def test_one_output_has_one_run_and_a_killed_one_leaves_no_folder(job, capsys):
    job.write("a", "hold")
    process = job.start()
    assert process.stdout.readline() == "holding\n"
    kept = set(job.names)
    assert job.run("--resume") == 1
    assert f"is being written by another run, process {process.pid}; wait for its end" in capsys.readouterr().err
    assert set(job.names) == kept
    job.write("a", "b")
    assert job.run(output="other.jsonl") == 0, "another output has no other run"
    process.kill()
    process.communicate()
    assert [name for name in job.names if "spool" in name]
    assert job.run("--overwrite") == 0
    assert not [name for name in job.names if name.startswith(".")]


def test_a_second_signal_quits_at_once(job):
    job.write("a", "hold")
    process = job.start("--stubborn")
    assert process.stdout.readline() == "holding\n"
    process.send_signal(signal.SIGINT)
    for line in process.stderr:
        if line.startswith("Stopping"):
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Interrupted:" not in err
    assert job.ids() == ["id-0"]
    assert job.names == ["in.jsonl", "out.jsonl", "out.manifest.json"]
