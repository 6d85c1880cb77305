"""Owns the sub-command `weights`: its flags and its workload."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from comparison.workload import model_config

from large_model.measure import ENGINES, Run, Workload, check, run_rounds
from large_model.report import bound_table, memory_table, speed_table
from sgl_batch.config import parse_bytes
from sgl_batch.errors import ConfigError

HELP = "a model larger than memory, in a control group: streamed weights, the kernel's paging, accelerate's offload"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this sub-command."""
    parser.add_argument("--limit", default="4G", help="memory of an engine's processes and their page cache (4G)")
    parser.add_argument("--groups", type=int, nargs="+", default=[16, 128, 512, 2048], help="sequences at once")
    parser.add_argument("--input-len", type=int, default=16, help="tokens of a prompt (16)")
    parser.add_argument("--output-len", type=int, default=16, help="tokens to generate (16)")
    parser.add_argument("--engines", default=",".join(ENGINES), help=f"any of {', '.join(ENGINES)} (all)")
    parser.add_argument("--read-threads", type=int, default=4, help="threads that read streamed weights (4)")
    parser.add_argument("--scratch", type=Path, help="directory for the files of the others, as large as the model")


class Measurement:
    """The rounds of one call of the command, and their report."""

    def __init__(self, options: argparse.Namespace, out: Path) -> None:
        self._engines = [name.strip() for name in options.engines.split(",") if name.strip()]
        self._rounds, self._out, self._runs = options.rounds, out, list[Run]()
        if min(*options.groups, options.input_len, options.output_len, options.read_threads) < 1:
            raise ConfigError("a group, a length or the threads are below 1")
        self._scratch = options.scratch
        self._workload = Workload(
            model=options.model.resolve(),
            config=model_config(options.model),
            limit_bytes=parse_bytes("--limit", options.limit),
            groups=sorted(options.groups),
            input_len=options.input_len,
            output_len=options.output_len,
            threads=options.read_threads,
            limit_s=options.timeout_s,
        )
        check(self._workload, self._engines)

    def run(self, say: Callable[[str], None]) -> None:
        """Run all rounds; an engine that fails is reported with its finished rounds."""
        with tempfile.TemporaryDirectory(dir=self._scratch or self._out, prefix="scratch-") as scratch:
            run_rounds(self._workload, Path(scratch), self._engines, self._rounds, self._runs, self._out, say)

    def report(self) -> str:
        """Return the tables in Markdown."""
        workload = self._workload
        size = sum(file.stat().st_size for file in workload.model.glob("*.safetensors"))
        head = (
            f"{size / 1e9:.1f} GB of weights, a limit of "
            f"{workload.limit_bytes / 2**30:.1f} GiB for an engine's processes and their page cache; prompts of "
            f"{workload.input_len} tokens, {workload.output_len} tokens generated."
        )
        return "\n\n".join(
            [
                head,
                speed_table(workload, self._runs, self._engines),
                "Streamed weights against the disk (needed: experts that the passes asked for):",
                bound_table(workload, self._runs),
                memory_table(self._runs, self._engines),
                "",
            ]
        )

    def record(self) -> dict[str, Any]:
        """Return all figures."""
        runs = json.loads(json.dumps([asdict(run) for run in self._runs]))
        return {"limit_bytes": self._workload.limit_bytes, "output_len": self._workload.output_len, "runs": runs}
