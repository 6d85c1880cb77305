"""`sgl-batch doctor`: the row of each check on several machines, also of one that raises, hangs or crashes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sgl_batch.cli.doctor import device_checks, host_checks, model_checks, package_checks, rate_checks
from sgl_batch.cli.doctor.child import rows_of
from sgl_batch.cli.doctor.command import doctor_command
from sgl_batch.cli.doctor.machine import Machine
from sgl_batch.cli.doctor.rows import Check, Row, State, can_run, table
from sgl_batch.cli.doctor.running import run_checks
from sgl_batch.core.start_choices import Choice
from sgl_batch.errors import ConfigError
from sgl_batch.startup.choice_cache import ChoiceCache, ChoiceKey, choice_directory, model_hash, versions

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny-qwen3-moe"

# A child in which "raises" raises, "hangs" never answers, "crashes" is killed by a signal, and all others answer.
CHILD = """
import os, sys, threading
from sgl_batch.cli.doctor.child import answer
from sgl_batch.cli.doctor.rows import Check, Row, State

def rows(name):
    def run(machine):
        if name == "raises":
            raise ValueError("no such thing\\nsecond line")
        if name == "hangs":
            threading.Event().wait()
        if name == "crashes":
            print("a library's last words", file=sys.stderr, flush=True)
            os.abort()
        print("what a library prints")
        return [Row(check=name, state=State.OK, found=f"pid {os.getpid()}")]
    return run

names = ("fine", "raises", "hangs", "crashes", "unrun", "last")
answer({name: Check(name=name, rows=rows(name), required=name == "raises") for name in names}, sys.argv[1:])
"""


class Gpu:
    """torch with a GPU, as far as checks use it."""

    version = SimpleNamespace(cuda="13.0")
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        mem_get_info=lambda _: (130 << 30, 139 << 30),
        get_device_capability=lambda _: (9, 0),
        get_device_name=lambda _: "NVIDIA H200",
    )


class Cpu:
    """torch without a GPU."""

    version = SimpleNamespace(cuda=None)
    cuda = SimpleNamespace(is_available=lambda: False)


def loader(**modules):
    def load(name):
        found = modules.get(name.replace(".", "_"))
        if found is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])
        if isinstance(found, Exception):
            raise found
        return found

    return load


def machine(tmp_path, versions=None, **modules):
    return Machine(root=tmp_path, environment={}, load=loader(**modules), version_of=(versions or {}).get)


def package(name):
    return next(one for one in package_checks.PACKAGES if one.name == name)


def files(root, **texts):
    for name, text in texts.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_check_that_raises_hangs_or_crashes_is_a_failed_row_and_the_others_go_on():
    def check(name, **more):
        return Check(name=name, rows=lambda _: [], remedy=f"mend {name}", **more)

    checks = [
        check("fine", timeout_s=60),
        check("raises", timeout_s=60),
        check("hangs", timeout_s=0.2),
        check("crashes", timeout_s=60),
        check("unrun", after="crashes"),
        check("last", timeout_s=60),
    ]
    rows = list(run_checks(checks, [], [sys.executable, "-c", CHILD]))
    found = {row.check: row for row in rows}
    assert [row.check for row in rows] == ["fine", "raises", "hangs", "crashes", "unrun", "last"]
    assert found["raises"].state is State.FAILED
    assert found["raises"].found == "ValueError: no such thing"
    assert found["hangs"].found == "no answer within 0.2 s"
    assert found["crashes"].found == "its process ended with SIGABRT: a library's last words"
    assert found["unrun"].found == "not run: the check of crashes gave no answer"
    assert found["crashes"].remedy == "mend crashes"
    pids = {found[name].found for name in ("fine", "last")}
    assert len(pids) == 2, "a crash does not end what comes after it"


def test_only_required_checks_that_fail_prevent_a_run():
    def row(state, required):
        return Row(check="x", state=state, found="", required=required)

    assert can_run([row(state, False) for state in State])
    assert can_run([row(State.OK, True), row(State.WARNING, True)])
    assert not can_run([row(State.MISSING, True)])
    assert not can_run([row(State.FAILED, True)])


def test_the_command_prints_a_table_writes_json_and_exits_with_the_verdict(tmp_path, capsys):
    bad = Row(check="torch", state=State.MISSING, found="not installed", remedy="install it", required=True)
    path = tmp_path / "doctor.json"
    assert doctor_command(["--json", str(path)], lambda _: [bad]) == 1
    out = capsys.readouterr().out
    assert "torch  missing  not installed" in out
    assert "-> install it" in out
    assert "No engine can run here: torch." in out
    assert json.loads(path.read_text())["can_run"] is False
    good = Row(check="disk", state=State.FAILED, found="", values={"read_bytes_per_s": 1.0})
    assert doctor_command([], lambda _: [good]) == 0
    assert doctor_command(["--json", str(tmp_path / "no" / "x")], lambda _: [good]) == 1
    assert "name another --json" in capsys.readouterr().err
    assert all(
        len(line) < 125 for line in table([bad, Row(check="y", state=State.OK, found="word " * 60)]).splitlines()
    )


def test_packages_for_a_gpu_are_required_only_on_a_gpu(tmp_path):
    kernels = package("sgl_kernel")
    on_cpu = package_checks.package_row(kernels, machine(tmp_path, torch=Cpu))
    assert (on_cpu.state, on_cpu.required) == (State.MISSING, False)
    on_gpu = package_checks.package_row(kernels, machine(tmp_path, torch=Gpu))
    assert on_gpu.prevents_run
    assert on_gpu.remedy
    optional = package_checks.package_row(package("deep_ep"), machine(tmp_path, torch=Gpu))
    assert (optional.state, optional.prevents_run) == (State.MISSING, False)


@pytest.mark.parametrize("name", ["flashinfer", "xgrammar"])
def test_what_an_engine_replaces_may_be_missing_but_not_broken(tmp_path, name):
    missing = package_checks.package_row(package(name), machine(tmp_path, torch=Gpu))
    assert (missing.state, missing.prevents_run) == (State.MISSING, False)
    error = ImportError("undefined symbol")
    modules = {"torch": Gpu, package(name).module.replace(".", "_"): error}
    broken = package_checks.package_row(package(name), machine(tmp_path, **modules))
    assert (broken.state, broken.prevents_run) == (State.FAILED, True)


@pytest.mark.parametrize(
    "error", [OSError("libcudart.so.13: cannot open"), ModuleNotFoundError("No module named 'tvm'", name="tvm")]
)
def test_an_installed_package_that_does_not_import_has_failed_with_its_error(tmp_path, error):
    row = package_checks.package_row(package("xgrammar"), machine(tmp_path, {"xgrammar": "0.2.1"}, xgrammar=error))
    assert (row.state, row.prevents_run) == (State.FAILED, True)
    assert "0.2.1" in row.found
    assert str(error) in row.found


def test_another_sglang_than_ours_has_failed_and_none_is_missing(monkeypatch, tmp_path):
    def refuse():
        raise ConfigError("sglang 9 is installed; install sglang==0.5.16")

    monkeypatch.setattr(package_checks.bootstrap, "sglang_version", refuse)
    for installed, state in (({"sglang": "9"}, State.FAILED), ({}, State.MISSING)):
        (row,) = package_checks.sglang(machine(tmp_path, installed))
        assert (row.state, row.prevents_run, row.found[:8]) == (state, True, "sglang 9")


def test_devices_are_named_with_memory_and_runtime(tmp_path):
    (row,) = device_checks.devices(machine(tmp_path, torch=Gpu))
    assert row.found == "NVIDIA H200, sm90, 130.00 GiB free of 139.00 GiB, CUDA 13.0 in torch"
    (cpu,) = device_checks.devices(machine(tmp_path, torch=Cpu))
    assert (cpu.state, cpu.found) == (State.OK, "CPU (torch is a CPU build)")
    files(tmp_path, proc__driver__nvidia__version="NVRM version: NVIDIA UNIX 580.1\nGCC version: 12\n")
    (unused,) = device_checks.devices(machine(tmp_path, torch=Cpu))
    assert unused.state is State.WARNING
    assert "install torch with CUDA" in unused.remedy
    assert device_checks.driver(machine(tmp_path))[0].found == "NVIDIA UNIX 580.1"


def test_attention_backends_are_those_whose_kernels_load(tmp_path):
    flash_ops = {"sgl_kernel_flash_ops": object()}
    (row,) = device_checks.attention(machine(tmp_path, torch=Gpu, triton=object(), **flash_ops))
    assert row.values["runnable"] == ["fa3", "triton"]
    (none,) = device_checks.attention(machine(tmp_path, torch=Gpu))
    assert none.prevents_run
    (cpu,) = device_checks.attention(machine(tmp_path, torch=Cpu))
    assert cpu.found == "sgl_batch_cpu (by torch operators)"


def test_the_chosen_instruction_set_is_shown_and_a_wrong_one_fails(tmp_path):
    def refuse():
        raise RuntimeError("SGL_BATCH_ISA is 'amx'; this machine runs avx2\nmore")

    kernels = SimpleNamespace(isa=lambda: "avx2", runnable_isas=lambda: ["avx2", "portable"])
    check = Check(name="CPU kernels", rows=device_checks.instruction_set, required=True)
    (row,) = rows_of(check, machine(tmp_path, sgl_batch_kernel=kernels))
    assert row.found == "avx2 (the best of avx2, portable)"
    (none,) = rows_of(check, machine(tmp_path))
    assert (none.state, none.prevents_run) == (State.WARNING, False)
    kernels.isa = refuse
    (wrong,) = rows_of(check, machine(tmp_path, sgl_batch_kernel=kernels))
    assert wrong.prevents_run
    assert wrong.found == "RuntimeError: SGL_BATCH_ISA is 'amx'; this machine runs avx2"


def test_limits_of_the_machine_are_read(tmp_path):
    files(
        tmp_path,
        proc__meminfo="MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n",
        proc__self__cgroup="0::/job\n",
        sys__kernel__mm__transparent_hugepage__enabled="always madvise [never]\n",
    )
    group = tmp_path / "sys/fs/cgroup/job"
    files(group, **{"memory.max": str(2 << 30), "memory.current": str(1 << 30), "memory.stat": "file_mapped 0\n"})
    here = machine(tmp_path)
    (memory,) = host_checks.memory(here)
    assert (memory.state, memory.values) == (State.WARNING, {"free_bytes": 1 << 30, "total_bytes": 16 << 30})
    (pages,) = host_checks.huge_pages(here)
    assert (pages.state, pages.found) == (State.WARNING, "transparent huge pages: never")
    assert host_checks.shared_memory(here)[0].state is State.MISSING
    assert host_checks.open_files(here, (1024, 4096))[0].remedy
    assert host_checks.open_files(here, (-1, -1))[0].state is State.OK
    assert host_checks.python(here, (3, 10, 2))[0].prevents_run
    assert host_checks.python(here, (3, 12, 2))[0].state is State.OK
    assert host_checks.system(here)[0].values["cores"] == len(os.sched_getaffinity(0))


def test_a_model_that_cannot_be_loaded_prevents_a_run(tmp_path):
    assert model_checks.model(Machine()) == []
    (good,) = model_checks.model(Machine(model=MODEL))
    assert "16 experts" in good.found
    (bad,) = model_checks.model(Machine(model=tmp_path))
    assert bad.prevents_run
    assert "config.json" in bad.found


def test_the_choices_of_self_checks_on_this_device_are_shown(tmp_path):
    here = Machine(environment={"XDG_CACHE_HOME": str(tmp_path)}, load=loader(torch=Gpu), model=MODEL)
    (none,) = model_checks.self_checks(here)
    assert none.found == "not measured on this machine"
    cache, settings = ChoiceCache(choice_directory(here.environment)), {"sizes": [256, 16]}
    for device, model, why in (
        ("NVIDIA H200", model_hash(str(MODEL)), "sglang: 1.00 ms"),
        ("NVIDIA H200", "another", "eager: 2.00 ms"),
        ("cpu", model_hash(str(MODEL)), "default: 9.00 ms"),
    ):
        key = ChoiceKey(option="decode_forward", device=device, model=model, versions=versions(), settings=settings)
        cache.keep(key, Choice(mode=why.partition(":")[0], why=why, numbers={"default": [1.0]}))
    (one,) = model_checks.self_checks(here)
    assert one.found == f"decode forward, model {model_hash(str(MODEL))[:8]}, groups of [256, 16]: sglang: 1.00 ms"
    (both,) = model_checks.self_checks(dataclasses.replace(here, model=None))
    assert {choice["mode"] for choice in both.values["choices"]} == {"sglang", "eager"}


def test_rates_are_measured_on_small_pieces(tmp_path):
    import torch

    (copied,) = rate_checks.copies(machine(tmp_path, torch=torch), num_bytes=1 << 20)
    assert copied.values["memory_bytes_per_s"] > 0
    (read,) = rate_checks.disk(Machine(), num_bytes=8 << 20)
    assert read.values["read_bytes_per_s"] > 0


def test_the_doctor_looks_at_this_machine(tmp_path):
    path = tmp_path / "doctor.json"
    command = [sys.executable, "-m", "sgl_batch.cli", "doctor", "--model", str(MODEL), "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(path.read_text())
    rows = {row["check"]: row for row in found["rows"]}
    assert found["can_run"]
    assert found["took_s"] < 60
    for name in ("python", "torch", "xgrammar", "triton", "sglang", "device", "attention backends", "model"):
        assert rows[name]["state"] == "ok", rows[name]
    assert rows["sglang"]["values"]["version"] == "0.5.16"
    assert rows["disk"]["values"]["read_bytes_per_s"] > 0
    assert sum(name.startswith("device") for name in rows) >= 1
