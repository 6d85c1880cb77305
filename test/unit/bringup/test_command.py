"""The list of stages is complete and in order, impossible options are refused, and a trace is counted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from bringup.command import main
from bringup.decode_trace import step_cost
from bringup.engine_stages import FAMILIES_BESIDE, engines
from bringup.folder_lock import held
from bringup.machine import Machine
from bringup.stages import BENCHMARKS, HERE, ROOT, Runs, all_stages
from sgl_batch.config import field_names, split_kwargs
from sgl_batch.core import supported_models
from sgl_batch.core.supported_models import has_adapter
from tiny_models.random_families import DEEPSEEK_V2, FAMILIES

MACHINES = [Machine(device=device, dtype="bfloat16", folder=Path("out")) for device in ("cuda", "cpu")]


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.device)
def test_each_stage_needs_earlier_ones_and_has_a_program(machine: Machine) -> None:
    seen: set[str] = set()
    for stage in all_stages(machine):
        assert set(stage.needs) <= seen, f"{stage.name} comes before what it needs"
        assert stage.name not in seen
        assert stage.expected_s <= stage.limit_s
        seen.add(stage.name)
        for argument in stage.argv[1:]:
            if argument.endswith(".py"):
                assert (ROOT / argument).exists(), argument
    if not machine.on_gpu:
        reachable = {stage.name for stage in all_stages(machine) if stage.runs is not Runs.GPU}
        assert all(set(stage.needs) <= reachable for stage in all_stages(machine) if stage.name in reachable)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.device)
def test_every_argument_of_an_engine_is_one_that_it_has(machine: Machine) -> None:
    from sgl_batch.sglang_adapter.processes import argument_names

    for engine in engines():
        spec = engine.spec(machine)
        ours, others = split_kwargs(spec["arguments"])
        assert others.keys() <= set(argument_names()), engine.name
        assert spec["keeps"] == (spec["engine"] != "ours")
        assert ours.flat().keys() == field_names()
        if not spec["keeps"]:
            reference = next(one for one in engines() if one.name == engine.against)
            assert reference.spec(machine)["reference"] == spec["reference"]
            assert reference.model == engine.model


def test_every_family_with_an_adapter_has_an_engine() -> None:
    named = {family.name: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.model_type] for family in (*FAMILIES, DEEPSEEK_V2)}
    first = {"Qwen3MoeForCausalLM", "MixtralForCausalLM", "DeepseekV3ForCausalLM"}
    tried = first | {named[name] for name in FAMILIES_BESIDE}
    assert tried == {name for row in supported_models.FAMILIES for name in row.architectures if has_adapter(name)}
    names = {engine.name for engine in engines()}
    assert {f"family-{name}" for name in FAMILIES_BESIDE} <= names


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "stock,grahps"], "names 'grahps', which is no stage"),
        (["--minutes", "0"], "--minutes is 0.0; it must be more than 0"),
        (["--commands"], "--commands goes with --list"),
    ],
)
def test_options_that_cannot_be_met_are_refused(options: list[str], message: str, tmp_path: Path, capsys) -> None:
    assert main(["--dry-run", "--out", str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_dry_run_reports_every_device_stage_as_not_run(tmp_path: Path) -> None:
    """By the command itself; of the stages that need no device, the one named has no time."""
    command = [sys.executable, str(HERE.parent / "gpu_bringup"), "--dry-run", "--minutes", "0.001"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    state = json.loads((tmp_path / "dry-run" / "state.json").read_text())
    assert {outcome["state"] for outcome in state.values()} == {"not run"}
    on_devices = [stage.name for stage in all_stages(MACHINES[0]) if stage.runs is not Runs.ANYWHERE]
    assert {name for name, outcome in state.items() if outcome["remark"] == "dry run"} == set(on_devices)
    assert done.stdout.splitlines()[0].split()[:2] == ["stage", "state"]


def test_a_second_call_on_a_folder_is_refused_while_the_first_works_on_it(tmp_path: Path, capsys) -> None:
    arguments = ["--dry-run", "--minutes", "0.001", "--out", str(tmp_path)]
    with held(tmp_path / "dry-run"):
        assert main(arguments) == 2
    assert f"{tmp_path / 'dry-run'} is held by another call" in capsys.readouterr().err
    assert not (tmp_path / "dry-run" / "state.json").exists()
    with held(tmp_path / "dry-run"):
        pass


def event(name: str, category: str, begin: float, duration: float, thread: int = 1) -> dict[str, object]:
    return {"ph": "X", "name": name, "cat": category, "ts": begin, "dur": duration, "pid": 1, "tid": thread}


def test_a_trace_is_counted_by_step_and_layer() -> None:
    events = [
        event("aten::mm", "cpu_op", 0, 50),
        event("cudaLaunchKernel", "cuda_runtime", 10, 5),
        event("aten::add", "cpu_op", 60, 40),
        event("cuLaunchKernelEx", "cuda_driver", 70, 5),
        event("cudaGraphLaunch", "cuda_runtime", 110, 10),
        event("cudaStreamSynchronize", "cuda_runtime", 120, 280),
        event("gemm", "kernel", 20, 1000),
        event("aten::copy_", "cpu_op", 0, 9000, thread=2),
    ]
    cost = step_cost(events, steps=2, layers=1)
    assert cost is not None
    assert (cost.kernels, cost.graphs, cost.waits, cost.operators) == (1.0, 0.5, 0.5, 1.0)
    assert cost.host_us == 60.0, "400 us of two steps, of which 280 were a wait"
    assert step_cost(events[6:7], steps=2, layers=1) is None


def test_the_benchmarks_are_those_that_there_are() -> None:
    sys.path.append(str(ROOT / "benchmark"))
    from gpu_comparison.regimes import REGIMES

    assert tuple(REGIMES) == BENCHMARKS
