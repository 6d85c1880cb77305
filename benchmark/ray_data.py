#!/usr/bin/env python
"""Measures what Ray Data costs: the same rows through `Engine.generate`, and through the processor of `sgl_batch.ray`.

Both answer questions from Parquet with the same engine, in alternating rounds, each in a process of its own. Rows per
second are of the time in which the engine has rows; beside them stands the time of the whole program, with its imports
and the start of the engine, and of Ray.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "test"))
from ray_cluster import SYSTEM_CONFIG, ray_environment

ROOT = Path(__file__).resolve().parents[1]
_MEASURED = re.compile(r"rows: (\d+) answered in ([\d.]+) s, at most (\d+) in the engine at once; ([\d.]+) decoded")


def direct(args: argparse.Namespace, directory: Path) -> None:
    """Answer all rows with one call of Engine.generate."""
    from sgl_batch import Engine

    table = pq.read_table(directory / "in")
    engine = Engine(model_path=args.model, **engine_arguments(args))
    began = time.monotonic()
    answers = engine.generate(table.column("prompt").to_pylist(), sampling(args))
    took = time.monotonic() - began
    counters = engine.batch_stats()["counters"]
    engine.shutdown()
    pq.write_table(table.append_column("text", pa.array([one["text"] for one in answers])), directory / "out.parquet")
    decoded = counters["decode_rows"] / counters["decode_groups"]
    rows = len(answers)
    print(
        f"rows: {rows} answered in {took:.1f} s, at most {rows} in the engine at once; {decoded:.1f} decoded together"
    )


def through_ray(args: argparse.Namespace, directory: Path) -> None:
    """Answer all rows with the processor, on a Ray of its own on this machine."""
    import ray
    from ray.data.llm import build_processor

    from sgl_batch.ray import SglBatchEngineProcessorConfig

    ray.init(
        num_cpus=args.cpus + 1, _node_ip_address="127.0.0.1", include_dashboard=False, _system_config=SYSTEM_CONFIG
    )
    config = SglBatchEngineProcessorConfig(
        model_source=args.model,
        engine_kwargs=engine_arguments(args),
        sampling_params=sampling(args),
        num_cpus=args.cpus,
    )
    build_processor(config)(ray.data.read_parquet(str(directory / "in"))).write_parquet(str(directory / "out"))
    time.sleep(1.0)  # Ray forwards what the actor has logged
    ray.shutdown()


def engine_arguments(args: argparse.Namespace) -> dict[str, object]:
    """Return the arguments of the engine, the same in both ways."""
    return {"b_moe_decode": args.b_moe_decode, "device": "cpu"}


def sampling(args: argparse.Namespace) -> dict[str, object]:
    """Return sampling parameters that make all answers as long."""
    return {"temperature": 0, "max_new_tokens": args.output_len, "ignore_eos": True}


def measure(way: str, args: argparse.Namespace) -> dict[str, float]:
    """Run one way in a process of its own."""
    with tempfile.TemporaryDirectory() as directory, ray_environment(ROOT) as environment:
        write_rows(Path(directory) / "in", args)
        began = time.monotonic()
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way, "--directory", directory]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        wall = time.monotonic() - began
    found = _MEASURED.findall(done.stdout + done.stderr)
    if done.returncode != 0 or not found:
        raise SystemExit(f"{way} failed:\n{done.stderr[-3000:]}")
    rows, seconds, most, decoded = map(float, found[-1])
    return {"rows": rows, "rows_per_s": rows / seconds, "wall_s": wall, "most": most, "decoded": decoded}


def write_rows(path: Path, args: argparse.Namespace) -> None:
    """Write the questions as Parquet, repeated where there are fewer."""
    lines = args.questions.read_text(encoding="utf-8").splitlines()
    prompts = list(islice(cycle([json.loads(line)["question"] for line in lines if line.strip()]), args.rows))
    path.mkdir()
    pq.write_table(pa.table({"custom_id": [str(i) for i in range(args.rows)], "prompt": prompts}), path / "a.parquet")


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--questions", type=Path, required=True, help="JSONL with a field `question`, such as GSM8K's")
    parser.add_argument("--model", default=str(ROOT / "test" / "models" / "tiny-qwen3-moe"))
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--b-moe-decode", type=int, default=256)
    parser.add_argument("--cpus", type=int, default=2, help="CPUs of the engine")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--way", choices=("direct", "ray"), help="be one of the measured programs")
    parser.add_argument("--directory", type=Path, help="with --way: where its files are")
    return parser.parse_args()


def main() -> None:
    """Measure both ways in alternating rounds, and print their medians."""
    args = parse()
    if args.way:
        {"direct": direct, "ray": through_ray}[args.way](args, args.directory)
        return
    found: dict[str, list[dict[str, float]]] = {"direct": [], "ray": []}
    for _ in range(args.rounds):
        for way, rounds in found.items():
            rounds.append(measure(way, args))
            print(way, json.dumps({name: round(value, 1) for name, value in rounds[-1].items()}), flush=True)
    for way, rounds in found.items():
        medians = {name: round(statistics.median(one[name] for one in rounds), 1) for name in rounds[0]}
        print(f"median of {way}: {json.dumps(medians)}")


if __name__ == "__main__":
    main()
