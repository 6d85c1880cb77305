#!/usr/bin/env python
"""Owns the command that measures what each coroutine primitive costs, and the decode step that it interrupts.

In the form of BatchGen's table 2. What runs is what the engine runs: its accumulation buffer, host KV store, copy
engine, decisions, migrator, and an engine for the decode step. Not yet run on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from comparison import machine
from comparison.terminal import exit_code, say
from gpu_comparison.shapes import ITEM_BYTES, ModelShape, qwen3_30b
from primitive_costs import decisions, decode_steps, kv_moves, migrations, within_pass
from primitive_costs.decode_steps import Steps
from primitive_costs.report import markdown
from primitive_costs.shape import offline_shape
from primitive_costs.timing import Cost

from sgl_batch.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
EPILOG = """\
examples:
  python benchmark/primitives.py
      512 sequences on the shape of `offline.py --make-model`; on a GPU that of Qwen3-30B-A3B
  python benchmark/primitives.py --batch 8 --contexts 64 --layers 2 --steps 4 --rounds 2 --no-migration
      a quick look at whether everything runs here

The table goes to standard output, progress to standard error; --json writes every sample to a file.
"""


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=512, help="sequences of the decode group (512)")
    parser.add_argument("--b-attn", type=int, default=64, help="sequences of an attention sub-batch (64)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024, 4096], help="tokens of KV a sequence")
    parser.add_argument("--layers", type=int, help="of the model (as the shape has: 12, on a GPU 48)")
    parser.add_argument("--page-size", type=int, default=64, help="tokens of a page (64)")
    parser.add_argument("--steps", type=int, default=8, help="decode steps that are timed in a round (8)")
    parser.add_argument("--rounds", type=int, default=5, help="(5)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(auto)")
    parser.add_argument("--attention-backend", default="triton", help="on a GPU (triton)")
    parser.add_argument("--copy-threads", type=int, default=1, help="that copy pages on a CPU, as the engine's (1)")
    parser.add_argument("--no-migration", action="store_true", help="leave out the two processes that migrate")
    parser.add_argument("--no-engine", action="store_true", help="leave out the decode step")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every sample")
    options = parser.parse_args(argv)
    numbers = ("batch", "b_attn", "layers", "page_size", "steps", "rounds", "copy_threads")
    given = [(name, getattr(options, name)) for name in numbers] + [("contexts", min(options.contexts))]
    for name, value in given:
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, and torch sees no GPU here: leave it out")
    return options


def measure(options: argparse.Namespace, shape: ModelShape, device: str, costs: list[Cost], steps: list[Steps]) -> None:
    """Measure all primitives, then the decode step; add the results to `costs` and `steps`."""
    batch, contexts, rounds = options.batch, sorted(options.contexts), options.rounds
    say(f"within a pass, {batch} sequences")
    costs += within_pass.measure(
        batch=batch, b_attn=options.b_attn, hidden=shape.hidden, layers=shape.layers, device=device, rounds=rounds
    )
    say("states and decisions")
    costs += decisions.measure(batch=batch, context=contexts[0], rounds=rounds)
    say("KV between the device and the store")
    sizes = kv_moves.KVSizes(
        layers=shape.layers,
        part_bytes=options.page_size * shape.kv_heads * shape.head_dim * ITEM_BYTES,
        page_size=options.page_size,
        copy_threads=options.copy_threads,
    )
    costs += kv_moves.measure(sizes, batch=batch, contexts=contexts, device=device, rounds=rounds)
    if not options.no_migration:
        say("migration between two processes")
        costs += migrations.measure(shape, contexts=contexts, page_size=options.page_size, rounds=rounds)
    if options.no_engine:
        return
    say("the decode step of an engine")
    where: dict[str, Any] = {"device": "cpu"}
    if device != "cpu":
        where = {"device": "cuda", "attention_backend": options.attention_backend, "disable_cuda_graph": True}
    with tempfile.TemporaryDirectory() as scratch:
        decode_steps.measure(
            shape.write(Path(scratch) / "model"),
            steps,
            batch=batch,
            contexts=contexts,
            steps=options.steps,
            rounds=rounds,
            vocabulary=shape.vocabulary,
            arguments={**where, "b_attn_decode": min(options.b_attn, batch), "page_size": options.page_size},
            say=say,
        )


def run(options: argparse.Namespace, argv: list[str]) -> int:
    """Measure, print the table, write the samples; return the exit code."""
    started = datetime.now().astimezone()
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.layers is not None:
        shape = offline_shape(options.layers) if device == "cpu" else qwen3_30b(options.layers)
    else:
        shape = offline_shape() if device == "cpu" else qwen3_30b(48)
    here, source, load = machine.hardware(), machine.source(ROOT), os.getloadavg()[0]
    costs, steps, code = list[Cost](), list[Steps](), 0
    # Report on SIGTERM as after Ctrl-C: the engine's processes must end too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        measure(options, shape, device, costs, steps)
    except KeyboardInterrupt:
        say("interrupted; reporting what is finished")
        code = 130
    changed = f" with {source['changed_files']} changed files" if source["changed_files"] else ""
    head = (
        f"{machine.describe(here)}; torch {torch.__version__}, {device}; "
        f"load average before: {load:.1f}.\n\n{started:%Y-%m-%d}, "
        f"{(source['commit'] or 'no git commit')[:12]}{changed}: `python benchmark/primitives.py {shlex.join(argv)}`"
    )
    text = f"{head}\n\n{markdown(shape, costs, steps, rounds=options.rounds)}"
    print(text, end="")
    if options.json is not None:
        record = {
            "machine": here,
            "source": source,
            "argv": argv,
            "load_average_before": load,
            "shape": asdict(shape),
            "costs": [asdict(cost) for cost in costs],
            "steps": [asdict(step) for step in steps],
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return code


def main(argv: list[str]) -> int:
    """Run the command. User errors end it with one line instead of a traceback."""
    return exit_code("primitives.py", lambda: run(parse(argv), argv))


if __name__ == "__main__":  # processes that migrate import this file again
    sys.exit(main(sys.argv[1:]))
