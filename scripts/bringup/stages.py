"""Owns what a stage is, and the list of all stages in their order. It runs nothing.

Seconds are guesses for one H200, where none of this has run yet.
"""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bringup.engine_stages import Engine, engines
from bringup.machine import Machine

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
BENCHMARKS = ("kv", "tight", "weights", "prefill", "resident", "accumulation", "accumulation-graphs")


class Runs(enum.Enum):
    """Where a stage can run: on any machine, on a GPU or in a small form on a CPU, on a GPU only."""

    ANYWHERE = "anywhere"
    EITHER = "GPU or CPU"
    GPU = "GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One process. `needs`: stages whose success it requires. It writes its result to `result`.

    `expected_s`: it is not begun with less time left; `limit_s`: when it is killed.
    """

    name: str
    what: str
    runs: Runs
    argv: tuple[str, ...]
    needs: tuple[str, ...] = ()
    expected_s: float = 60.0
    limit_s: float = 300.0


def all_stages(machine: Machine) -> tuple[Stage, ...]:
    """Return all stages in order: each needs only earlier ones."""
    return (
        _program("models", "make checkpoints of random weights, heads of 64 channels", Runs.ANYWHERE, machine, 60, 240),
        _program("imports", "import every module; say which packages are there", Runs.ANYWHERE, machine, 30, 240),
        _pytest(
            "compile",
            "compile the Triton kernels for sm_80 and sm_90, on any machine",
            Runs.ANYWHERE,
            ("test/unit/layers/moe/test_triton_kernels.py", "test/unit/kv_offload/test_page_copies.py"),
            "compile",
        ),
        _program("jit", "run the Triton kernels of experts and page copies once", Runs.GPU, machine, 60, 240),
        *(_engine(engine, machine) for engine in engines()),
        _program("copy-engine", "copies between pages and the host KV store, both ways", Runs.EITHER, machine, 30, 240),
        _program("page-kernel", "both ways to copy pages, byte for byte", Runs.GPU, machine, 30, 240),
        _pytest(
            "experts",
            "the expert runners keep their promises",
            Runs.EITHER,
            ("test/conformance/test_expert_runners.py",),
            "gpu" if machine.on_gpu else "torch",
            expected_s=120.0,
        ),
        *_launches(machine),
        *(_benchmark(regime, machine) for regime in BENCHMARKS),
    )


def _program(name: str, what: str, runs: Runs, machine: Machine, expected_s: float, limit_s: float) -> Stage:
    """Return the path of a stage's program, in this folder and named like the stage."""
    spec = {"stage": name, "device": machine.device, "dtype": machine.dtype, "models": str(machine.folder / "models")}
    argv = _call(f"{name.replace('-', '_')}_stage.py", spec, machine, name)
    return Stage(name=name, what=what, runs=runs, argv=argv, expected_s=expected_s, limit_s=limit_s)


def _call(script: str, spec: Mapping[str, object], machine: Machine, name: str) -> tuple[str, ...]:
    return sys.executable, str(HERE / script), json.dumps(spec), str(result_of(machine.folder, name))


def result_of(folder: Path, name: str) -> Path:
    """Return the file of a stage's result."""
    return folder / f"{name}.result.json"


def _pytest(name: str, what: str, runs: Runs, files: Sequence[str], words: str, *, expected_s: float = 60.0) -> Stage:
    argv = (sys.executable, "-m", "pytest", *files, "-k", words, "-q", "-p", "no:cacheprovider")
    return Stage(name=name, what=what, runs=runs, argv=argv, expected_s=expected_s, limit_s=300.0)


def _engine(engine: Engine, machine: Machine) -> Stage:
    spec = engine.spec(machine)
    return Stage(
        name=engine.name,
        what=engine.what,
        runs=Runs.GPU if engine.gpu_only else Runs.EITHER,
        argv=_call("engine_stage.py", spec, machine, engine.name),
        needs=(("models",) if engine.is_random else ()) + ((engine.against,) if engine.against else ()),
    )


def _launches(machine: Machine) -> list[Stage]:
    """Return stages that trace a decode step of one group: stock and ours without graphs, and ours with graphs."""
    stages = []
    for name, engine, what in (
        ("launches-stock", "stock", "launches and CPU time of a decode step by layer: stock SGLang, no graphs"),
        ("launches", "plain", "the same: ours, no graphs"),
        ("launches-graphs", "graphs", "the same: ours, steps as graphs"),
    ):
        found = next(one for one in engines() if one.name == engine)
        stages.append(
            Stage(
                name=name,
                what=what,
                runs=Runs.GPU if found.gpu_only else Runs.EITHER,
                argv=_call("launches_stage.py", found.spec(machine), machine, name),
                needs=(engine,),
            )
        )
    return stages


def _benchmark(regime: str, machine: Machine) -> Stage:
    """Return the stage of a regime of benchmark/gpu.py; on a CPU its tiny form, which tests the program."""
    minutes = machine.benchmark_minutes if machine.on_gpu else 4.0
    where = (
        ("--attention-backend", machine.attention_backend) if machine.on_gpu else ("--scale", "tiny", "--rounds", "1")
    )
    layers = ("--layers", "24") if machine.on_gpu and regime == "kv" else ()
    out = ("--out", str(machine.folder / f"benchmark-{regime}"), "--minutes", str(minutes))
    return Stage(
        name=f"benchmark-{regime}",
        what=f"benchmark/gpu.py --cases {regime}: beside stock SGLang",
        runs=Runs.EITHER if regime == "kv" else Runs.GPU,
        argv=(sys.executable, "benchmark/gpu.py", "--cases", regime, "--device", machine.device, *where, *layers, *out),
        needs=("plain",),
        expected_s=60.0 * minutes,
        limit_s=60.0 * minutes + 60.0,
    )
