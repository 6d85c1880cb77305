"""Runs a job with the in-memory engine and prints its peak memory in MiB; used by the memory test."""

from __future__ import annotations

import asyncio
import io
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

from in_memory_engine import InMemoryEngine

from sgl_batch.file_run.file_run import FileRun, RunSettings
from sgl_batch.file_run.line_file import LineFile
from sgl_batch.file_run.ordered_output import OrderedOutput
from sgl_batch.file_run.run_result import RunResult
from sgl_batch.file_run.waiting_results import WaitingResults
from sgl_batch.jobs.line_reader import read_lines, scan_input
from sgl_batch.jobs.progress_display import PlainDisplay
from sgl_batch.jobs.request_line import DEFAULT_MAX_LINE_BYTES, LineRules
from sgl_batch.jobs.seen_ids import SeenIds


async def run(path: Path) -> RunResult:
    """Run all lines. A line whose prompt begins with "wait" is answered after all others."""
    total = scan_input(path).num_lines
    others_done = asyncio.Event()

    async def before(body: Mapping[str, object]) -> None:
        if str(body["prompt"]).startswith("wait"):
            await others_done.wait()
        elif engine.num_answered == total - 2:
            others_done.set()

    engine = InMemoryEngine(before)
    seen = SeenIds(path.with_name("seen.db"))
    output = OrderedOutput(
        LineFile(path.with_name("out.jsonl")),
        LineFile(path.with_name("out.errors.jsonl")),
        WaitingResults(path.with_name("out.jsonl")),
    )
    settings = RunSettings(run_id="run", total=total, rules=LineRules(served_model_names=("tiny",)))
    lines = read_lines(path, DEFAULT_MAX_LINE_BYTES)
    result = await FileRun(settings, lines, engine, output, seen.claim, PlainDisplay(io.StringIO())).run(
        asyncio.Event()
    )
    output.close()
    seen.close()
    return result


if __name__ == "__main__":
    result = asyncio.run(run(Path(sys.argv[1])))
    assert result.missing == 0, result
    sys.stdout.write(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}\n")
