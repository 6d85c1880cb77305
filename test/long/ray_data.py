#!/usr/bin/env python
"""Owns the proof that a run of Ray Data with our engine gives one row for each id, whatever dies during it.

It starts a cluster of three raylets on this machine and runs a program on it: questions from Parquet to Parquet, with a
checkpoint and two engines. While the program runs, it kills a scheduler of an engine, then the node of an engine, and
later the program. It runs the program again, which goes on from the checkpoint. It fails (exit code 1) unless

- each id has one row in the output, with an answer, or with an error where the row has no prompt,
- all files of the output have one schema, and
- no process of Ray or of an engine is left.

pytest does not collect this file: it takes about five minutes on two cores. `--help` shows its flags.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ray_cluster import SYSTEM_CONFIG, left_after, processes_in, ray_environment

ROOT = Path(__file__).resolve().parents[2]

# One row in so many has no prompt.
EVERY_BAD = 100
ENGINES, ENGINE_CPUS, NODES, NODE_CPUS = 2, 2, 3, 3
STEP_S = 900.0
ENGINE = {"dtype": "float32", "b_moe_decode": 32, "max_total_tokens": 32768}
SAMPLING = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}
BATCH_SIZE = 16


class FaultError(Exception):
    """The run broke a promise; the message says which."""


def say(text: str) -> None:
    """Write a line to standard output at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def write_rows(path: Path, questions: Path, count: int) -> None:
    """Write `count` rows from a file of questions, which are repeated under new ids where they are fewer."""
    lines = questions.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line)["question"] for line in lines if line.strip()]
    prompts = [None if index % EVERY_BAD == 7 else text for index, text in enumerate(islice(cycle(rows), count))]
    path.mkdir(parents=True)
    pq.write_table(
        pa.table({"custom_id": [f"q-{index}" for index in range(count)], "prompt": prompts}), path / "a.parquet"
    )


def drive(address: str, directory: Path) -> None:
    """Be the user's program: answer the rows with a checkpoint."""
    import ray
    from ray.data.checkpoint import CheckpointConfig
    from ray.data.llm import build_processor

    from sgl_batch.ray import SglBatchEngineProcessorConfig

    ray.init(address=address, log_to_driver=True)
    ray.data.DataContext.get_current().checkpoint_config = CheckpointConfig(
        id_column="custom_id", checkpoint_path=str(directory / "checkpoint"), delete_checkpoint_on_success=False
    )
    config = SglBatchEngineProcessorConfig(
        model_source=str(ROOT / "test" / "models" / "tiny-qwen3-moe"),
        engine_kwargs=ENGINE,
        sampling_params=SAMPLING,
        batch_size=BATCH_SIZE,
        concurrency=ENGINES,
        num_cpus=ENGINE_CPUS,
    )
    build_processor(config)(ray.data.read_parquet(str(directory / "in"))).write_parquet(str(directory / "out"))


def rows_written(directory: Path) -> int:
    """Return how many rows the complete files of the output have."""
    count = 0
    for file in (directory / "out").glob("*.parquet"):
        try:
            count += pq.read_metadata(file).num_rows
        except (OSError, pa.ArrowException):  # it is being written
            continue
    return count


def wait_for(what: str, reached: Callable[[], bool], program: subprocess.Popen[bytes]) -> None:
    """Wait until the program has come so far. Raises FaultError where it ends before, or takes too long."""
    until = time.monotonic() + STEP_S
    while not reached():
        if program.poll() is not None:
            raise FaultError(f"the program ended with code {program.returncode} before {what}")
        if time.monotonic() > until:
            raise FaultError(f"{STEP_S:.0f} s were not enough for {what}")
        time.sleep(0.2)


def raylet_of(node: object) -> int:
    """Return the process id of a node's raylet."""
    return int(node.all_processes["raylet"][0].process.pid)


def node_of_an_engine(cluster: object) -> object:
    """Return a raylet, not the head, whose child processes are those of an engine."""
    for node in cluster.worker_nodes:
        children = psutil.Process(raylet_of(node)).children()
        if any("MapBatches(SglBatchPredictor)" in " ".join(child.cmdline()) for child in children):
            return node
    raise FaultError("no engine runs on a node that can be killed")


def schedulers() -> list[psutil.Process]:
    """Return the scheduler processes of all engines."""
    return [one for one in processes_in(os.environ["RAY_TMPDIR"]) if one.name().startswith("sglang::schedul")]


def kill_a_scheduler(other_than: int) -> None:
    """Kill the scheduler of an engine on another node than the one whose raylet has this process id.

    Rows in that engine are answered by the engine that its actor starts again: the other engine's node dies next.
    """
    for process in schedulers():
        if other_than not in [parent.pid for parent in process.parents()]:
            process.kill()
            return
    raise FaultError("all engines run on one node")


def run(directory: Path, questions: Path, count: int) -> None:
    """Run the program with both deaths. Raises FaultError."""
    from ray.cluster_utils import Cluster

    node_arguments = {
        "num_cpus": NODE_CPUS,
        "object_store_memory": 100 << 20,
        "include_dashboard": False,
    }
    head = {**node_arguments, "_system_config": SYSTEM_CONFIG}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(NODES - 1):
        cluster.add_node(**node_arguments)
    command = [sys.executable, __file__, "--questions", str(questions), "--drive", cluster.address]
    command += ["--keep", str(directory)]
    try:
        first = subprocess.Popen(command)
        wait_for("the first rows and both engines", lambda: bool(rows_written(directory) and schedulers()[1:]), first)
        node = node_of_an_engine(cluster)
        say(f"-- {rows_written(directory)} rows are written; a scheduler is killed on another node")
        kill_a_scheduler(other_than=raylet_of(node))
        wait_for("an eighth of the rows", lambda: rows_written(directory) >= count // 8, first)
        say(f"-- {rows_written(directory)} rows are written; a node with an engine is killed")
        cluster.remove_node(node, allow_graceful=False)
        wait_for("half of the rows", lambda: rows_written(directory) >= count // 2, first)
        first.send_signal(signal.SIGKILL)
        first.wait()
        time.sleep(2.0)  # writes under way end
        before = rows_written(directory)
        say(f"-- {before} rows are written; the program was killed, and is run again")
        again = subprocess.run(command, check=False, timeout=STEP_S)
        if again.returncode != 0:
            raise FaultError(f"the second run ended with code {again.returncode}")
        say(f"-- the second run wrote {rows_written(directory) - before} rows more")
    finally:
        cluster.shutdown()


def check(directory: Path, count: int) -> str:
    """Return what the output holds. Raises FaultError where it is not one row for each id."""
    tables = [pq.read_table(file) for file in sorted((directory / "out").glob("*.parquet"))]
    if len({str(table.schema.remove_metadata()) for table in tables}) != 1:
        raise FaultError("the files of the output have several schemas")
    rows = pa.concat_tables(tables).to_pylist()
    times = Counter(row["custom_id"] for row in rows)
    wanted = {f"q-{index}" for index in range(count)}
    several = [name for name, number in times.items() if number > 1]
    if several or times.keys() != wanted:
        raise FaultError(f"{len(several)} ids have several rows, and {len(wanted - times.keys())} ids have none")
    bad = {f"q-{index}" for index in range(count) if index % EVERY_BAD == 7}
    failed = {row["custom_id"]: row["__inference_error__"] for row in rows if row["__inference_error__"]}
    if failed.keys() != bad:
        raise FaultError(f"other rows have errors than those without a prompt: {dict(islice(failed.items(), 3))}")
    short = [row for row in rows if not row["__inference_error__"] and row["num_generated_tokens"] != 32]
    if short:
        raise FaultError(f"{len(short)} answers have another number of tokens than 32: {short[0]}")
    return f"{len(rows):,} rows for {count:,} ids in {len(tables)} files, {len(failed)} of them with an error"


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--questions",
        type=Path,
        required=True,
        help="JSONL with a field `question`, such as GSM8K's test file",
    )
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="where files go, and stay")
    parser.add_argument("--drive", metavar="ADDRESS", help="be the program that is killed, on the cluster at ADDRESS")
    return parser.parse_args()


def in_own_ray(directory: Path, args: argparse.Namespace) -> int:
    """Run this file again in the environment of a Ray of its own, and look what is left of it."""
    with ray_environment(ROOT) as environment:
        command = [sys.executable, __file__, "--questions", str(args.questions), "--rows", str(args.rows)]
        code = subprocess.run([*command, "--keep", str(directory)], env=environment, check=False).returncode
        left = left_after(environment["RAY_TMPDIR"], within_s=30)
    for line in left:
        say(f"FAILED: a process is left: {line}")
    return code or bool(left)


def main() -> int:
    """Return the exit code."""
    args = parse()
    if args.drive:
        drive(args.drive, args.keep)
        return 0
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        with tempfile.TemporaryDirectory() as directory:
            return in_own_ray(args.keep or Path(directory) / "run", args)
    try:
        write_rows(args.keep / "in", args.questions, args.rows)
        run(args.keep, args.questions, args.rows)
        say(f"passed: {check(args.keep, args.rows)}")
    except FaultError as fault:
        say(f"FAILED: {fault}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
