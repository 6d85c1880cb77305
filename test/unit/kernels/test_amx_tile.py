"""The AMX tile keeps its rules. On a processor without AMX its instructions are emulated one by one, as the manual
specifies them. Its speed, and whether a processor follows the manual, can be tested only on one with AMX.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KERNELS = HERE.parents[2] / "sgl-kernel" / "csrc" / "cpu"
REFUSED = 3

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is part of x86-64")


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of checks, compiled with the kernels' own source, and optimised as they are."""
    program = tmp_path_factory.mktemp("amx") / "checks"
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    sources = (HERE / "amx_tile_checks.cpp", HERE / "amx_emulation.cpp", KERNELS / "gemm_amx_bf16.cpp")
    flags = ("-std=c++20", "-O3", "-pthread", f"-I{KERNELS}", "-o", str(program))
    subprocess.run([*compiler, *flags, *map(str, sources)], check=True, timeout=300)
    return program


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=300, check=False)


def test_a_tile_is_exact_alone_and_with_other_rows_and_stays_within_its_memory(checks):
    done = run(checks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout in ("emulation\n", "hardware\n")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("17 rows", "configured too large"),
        ("reserved", "reserved bytes that are not zero"),
        ("unconfigured", "not configured"),
        ("left out", "leaves out"),
        ("after release", "not configured"),
        ("unlike rows", "do not fit"),
        ("read outside", "read outside"),
        ("written outside", "written outside"),
    ],
)
def test_the_emulation_refuses_what_the_instructions_do_not_allow(checks, rule, message):
    done = run(checks, rule)
    if done.stdout == "hardware\n":
        pytest.skip("this processor has AMX; nothing is emulated")
    assert done.returncode == REFUSED
    assert message in done.stderr
