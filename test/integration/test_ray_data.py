"""Ray Data's own builder runs our processor on a real raylet, from Parquet to Parquet, good rows and bad ones."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_cluster import left_after, ray_environment
from sgl_batch.control_plane.data.batches import ADDED

pytestmark = pytest.mark.engine

TOO_MANY = 1_000_000
# Two rows make a batch, and each batch has one whose answer is long: these are in the engine together.
LONG = 300  # tokens, as ray_data_run.py asks for
ROWS: dict[str, dict[str, Any]] = {
    "plain": {"prompt": "What does os.path.join do?"},
    "short": {"prompt": "Return the", "sampling_params": {"max_new_tokens": 2}},
    "chat": {"messages": [{"role": "user", "content": "Name a colour."}]},
    "too long": {"prompt": "Return the", "sampling_params": {"max_new_tokens": TOO_MANY}},
    "tokens": {"tokenized_prompt": [204, 1109, 270]},
    "bad value": {"prompt": "Return the", "sampling_params": {"temperature": -1.0}},
    "last": {"prompt": "Return the"},
    "empty": {},
}
BAD = {"empty": "the row has no prompt", "too long": str(TOO_MANY), "bad value": "temperature"}


@dataclass(frozen=True)
class Run:
    """A finished run: a table for each block, what the program said, and what it has left running."""

    tables: list[pa.Table]
    said: str
    left: list[str]


@pytest.fixture(scope="module")
def run(repo_root: Path, model_path: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run the program once for all tests: Ray and an engine take many seconds to start."""
    source, result = tmp_path_factory.mktemp("in"), tmp_path_factory.mktemp("out")
    columns = ("prompt", "messages", "tokenized_prompt", "sampling_params")
    rows = [{"custom_id": name, **{column: row.get(column) for column in columns}} for name, row in ROWS.items()]
    pq.write_table(pa.Table.from_pylist(rows), source / "rows.parquet")
    program, log = Path(__file__).with_name("ray_data_run.py"), tmp_path_factory.mktemp("log") / "said"
    command = [sys.executable, str(program), model_path("tiny-qwen3-moe"), str(source), str(result)]
    with ray_environment(repo_root) as environment, log.open("w") as said:
        finished = subprocess.run(command, env=environment, stdout=said, stderr=subprocess.STDOUT, check=False)
        left = left_after(environment["RAY_TMPDIR"], within_s=20)
    assert finished.returncode == 0, log.read_text()[-4000:]
    return Run([pq.read_table(file) for file in sorted(result.iterdir())], log.read_text(), left)


def test_each_row_has_one_answer_or_one_error(run: Run) -> None:
    found = [row for table in run.tables for row in table.to_pylist()]
    rows = {row["custom_id"]: row for row in found}
    assert len(found) == len(rows) == len(ROWS)
    for name, row in rows.items():
        if name in BAD:
            assert BAD[name] in row["__inference_error__"]
            assert (row["generated_text"], row["generated_tokens"], row["num_generated_tokens"]) == ("", [], 0)
        else:
            assert row["__inference_error__"] == ""
            assert len(row["generated_tokens"]) == row["num_generated_tokens"] == (2 if name == "short" else LONG)
            assert row["num_input_tokens"] > 0
    assert rows["tokens"]["num_input_tokens"] == 3


def test_blocks_with_and_without_failed_rows_have_one_schema(run: Run) -> None:
    assert len(run.tables) > 1
    wanted = pa.schema([("custom_id", pa.string()), *ADDED])
    assert [table.schema.remove_metadata().types for table in run.tables] == [wanted.types] * len(run.tables)


def test_the_rows_of_all_batches_are_in_the_engine_at_once_and_nothing_outlives_the_run(run: Run) -> None:
    found = re.search(r"rows: 7 answered in [\d.]+ s, at most (\d) in the engine at once", run.said)
    assert found is not None
    assert int(found[1]) >= len(ROWS) // 2
    assert run.left == []


def test_the_engine_computes_on_as_many_cpus_as_were_asked_of_ray(run: Run) -> None:
    assert set(re.findall(r"threads: \d+, on CPUs: \d+", run.said)) == {"threads: 1, on CPUs: 1"}
