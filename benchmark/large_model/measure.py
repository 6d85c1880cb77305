"""Owns the rounds: which engine runs which groups with which memory, in alternating order, and the disk's rate."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comparison.child import is_installed, run_child, this_python

from large_model.confined import memory_limit
from sgl_batch.checkpoint.expert_layout import is_expert_weight
from sgl_batch.checkpoint.files import read_header
from sgl_batch.checkpoint.quantised import plain_name
from sgl_batch.errors import ConfigError
from sgl_batch.weights.disk_rate import disk_rate

ENGINES = ("sgl_batch", "mapped", "accelerate")
_HUGGING_FACE_BYTES = 9 << 28
_PAGE = 32
_RATE_BYTES = 2 << 30
# Ends of tensors that are read at the start alone.
_UNREAD = ("g_idx", "_shape", "_scale_inv")
_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Groups of random prompts, all with one length and one number of output tokens."""

    model: Path
    config: dict[str, Any]
    limit_bytes: int
    groups: list[int]
    input_len: int
    output_len: int
    threads: int
    limit_s: float

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the bytes of keys and values of all layers in bf16."""
        heads = self.config["num_key_value_heads"] * self.config["head_dim"]
        return int(2 * 2 * heads * self.config["num_hidden_layers"])

    @property
    def expert_bytes(self) -> int:
        """Return the bytes of an expert's three matrices in the checkpoint, each of tensors of its own."""
        num_bytes, matrices = 0, set[str]()
        for file in self.model.glob("*.safetensors"):
            for name, one in read_header(file).items():
                plain = plain_name(name)
                if is_expert_weight(plain) and not name.endswith(_UNREAD):
                    num_bytes += one.num_bytes
                    matrices.add(plain)
        return 3 * num_bytes // max(1, len(matrices))


@dataclass(slots=True, kw_only=True)
class Group:
    """One group of one engine in one round. `needed_bytes`: of the experts that its passes needed, if known."""

    engine: str
    round: int
    size: int
    wall_s: float
    disk_bytes_per_s: float
    needed_bytes: int = 0
    read_bytes: int = 0
    part_s: dict[str, float] = field(default_factory=dict)
    outputs: list[list[int]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Run:
    """One child process: its groups, its peak memory, and the reason of an early end."""

    engine: str
    round: int
    groups: list[Group]
    peak_bytes: int
    start_s: float
    fault: str | None


def run_rounds(
    workload: Workload,
    scratch: Path,
    engines: list[str],
    rounds: int,
    runs: list[Run],
    out: Path,
    say: Callable[[str], None],
) -> None:
    """Run all rounds and add them to `runs` one by one; an engine that fails does not affect the others."""
    for number in range(rounds):
        order = engines if number % 2 == 0 else engines[::-1]
        for engine in order:
            # The memory that the KV pool leaves decides how many of our experts stay: each size is a run of its own.
            parts = [[size] for size in workload.groups] if engine == "sgl_batch" else [workload.groups]
            for groups in parts:
                runs.append(_run(workload, scratch, engine, number, groups, out))
                say(f"round {number + 1}, {engine}: {_words(runs[-1])}")


def _words(run: Run) -> str:
    done = ", ".join(f"{group.size} in {group.wall_s:.1f} s" for group in run.groups)
    peak = f"peak {run.peak_bytes / 2**30:.2f} GiB"
    return f"{done or 'nothing'} ({peak}{'' if run.fault is None else '; ' + run.fault})"


def _run(workload: Workload, scratch: Path, engine: str, number: int, groups: list[int], out: Path) -> Run:
    name = f"{number}-{engine}-{groups[-1]}"
    result, so_far = out / f"{name}.json", out / f"{name}.part.json"
    rate = disk_rate(sorted(workload.model.glob("*.safetensors")), threads=workload.threads, most_bytes=_RATE_BYTES)
    with memory_limit(workload.limit_bytes) as confinement:
        spec = {
            "mode": engine,
            "model": str(workload.model),
            "groups": groups,
            "input_len": workload.input_len,
            "output_len": workload.output_len,
            "vocabulary": workload.config["vocab_size"],
            "seed": number,
            "procs": str(confinement.procs),
            "so_far": str(so_far),
            "scratch": str(scratch / "offload"),
            **_memory(workload, engine, max(groups)),
        }
        (out / f"{name}.spec.json").write_text(json.dumps(spec, indent=2), encoding="utf-8")
        environment = {}
        if engine == "mapped":
            environment = {
                "SGL_BATCH_BENCH_MAP": str(scratch),
                "PYTHONPATH": os.pathsep.join(
                    filter(None, [str(_HERE / "mapped_weights"), os.environ.get("PYTHONPATH")])
                ),
            }
        end = run_child(
            this_python(),
            out / f"{name}.spec.json",
            result,
            out / f"{name}.log",
            limit_s=workload.limit_s,
            threads=None,
            runner="large_model_round.py",
            environment=environment,
        )
        peak = confinement.peak_bytes()
    found = json.loads(so_far.read_text(encoding="utf-8")) if so_far.exists() else {"groups": [], "start_s": 0.0}
    done = [_group(workload, engine, number, rate, group) for group in found["groups"]]
    return Run(engine=engine, round=number, groups=done, peak_bytes=peak, start_s=found["start_s"], fault=end.reason)


def _group(workload: Workload, engine: str, number: int, rate: float, found: dict[str, Any]) -> Group:
    before, after = found["before"], found["after"]

    def counted(name: str) -> int:
        return int(after.get(name, 0) - before.get(name, 0))

    parts_before = before.get("part_s", {})
    return Group(
        engine=engine,
        round=number,
        size=found["size"],
        wall_s=found["wall_s"],
        disk_bytes_per_s=rate,
        needed_bytes=counted("weights_routed") * workload.expert_bytes,
        read_bytes=counted("weights_bytes_read"),
        part_s={name: value - parts_before[name] for name, value in after.get("part_s", {}).items()},
        outputs=found["outputs"],
    )


def _memory(workload: Workload, engine: str, largest: int) -> dict[str, Any]:
    """Return an engine's memory settings. Ours gives free memory to weights, as the operating system does."""
    tokens = -(-(workload.input_len + workload.output_len) // _PAGE) * _PAGE * largest
    if engine == "accelerate":
        kv = tokens * workload.kv_bytes_per_token
        return {"weight_memory": max(0, workload.limit_bytes - _HUGGING_FACE_BYTES - kv)}
    pool = tokens + 8 * _PAGE
    ours = {
        "page_size": _PAGE,
        "max_total_tokens": pool,
        "b_moe_decode": largest,
        "b_attn_decode": min(256, largest),
        "max_running_requests": largest,
        "ready_ahead": 0.0,
    }
    if engine == "sgl_batch":
        ours |= {"weights": "streamed", "weight_read_threads": workload.threads}
    return {"engine": ours}


def check(workload: Workload, engines: list[str]) -> None:
    """Raise ConfigError for settings that cannot be measured here."""
    unknown = [engine for engine in engines if engine not in ENGINES]
    if unknown:
        raise ConfigError(f"--engines names {unknown[0]!r}; known: {', '.join(ENGINES)}")
    if "accelerate" in engines and not is_installed(this_python(), "accelerate"):
        raise ConfigError("accelerate is not installed: pip install '.[bench]', or leave it out of --engines")
